"""What a user may set: frozen dataclasses that check themselves.

Every field is honoured exactly or refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from foretoken.errors import ConfigError
from foretoken.params import SamplingParams as SamplingParams
from foretoken.params import check_flag, check_number, check_text, check_whole

DRAFTERS: tuple[str, ...] = (
    "draft_model",
    "ngram",
    "suffix",
    "recycling",
    "predicted",
    "early_exit",
    "lookahead",
    "cascade",
    "mix",
    "auto",
)
SAMPLERS: tuple[str, ...] = ("draft_model", "early_exit")  # drafters that draw from a law
COMPOSITES: tuple[str, ...] = ("cascade", "mix", "auto")  # drafters that work with other drafters
LOOKUPS: tuple[str, ...] = (
    "ngram",
    "suffix",
    "recycling",
    "predicted",
)  # drafters that ask no model: their guesses are deterministic
COMBINE: tuple[str, ...] = ("best", "merge")
# What a part given by its name takes over from the configuration around it.
FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "draft_model": (
        "draft",
        "draft_dtype",
        "draft_vocabulary",
        "draft_probability",
        "min_confidence",
        "draft_top_k",
        "tree",
        "branching",
    ),
    "suffix": ("corpus",),
    "early_exit": ("exit_layer", "skip_layers", "draft_probability", "min_confidence", "draft_top_k"),
    "lookahead": ("lookahead_window", "lookahead_ngram"),
    "cascade": ("draft", "draft_dtype", "draft_probability", "min_confidence", "draft_top_k"),
}
QUANTISED: tuple[str, ...] = ("int8", "int4")
DRAFT_DTYPES: tuple[str, ...] = ("auto", "bfloat16", "float16", "float32", *QUANTISED)
# Eight rows: with a few guesses beside them about what a CPU runs at little more than the price of one.
_LOOKAHEAD: Mapping[str, int] = {"lookahead_window": 4, "lookahead_ngram": 3}
DTYPES: tuple[str, ...] = ("auto", "float32", "float16", "bfloat16", "float64")
NUMERICS: tuple[str, ...] = ("default", "strict")
TREES: tuple[str, ...] = ("chain", "static", "best_first")
RULES: tuple[str, ...] = ("auto", "greedy", "rejection", "block", "coupled", "tree", "traversal", "typical")
DRAFT_VOCABULARIES: tuple[str, ...] = ("auto", "same", "strings", "intersection")
LOSSY_RULES: tuple[str, ...] = ("typical",)

_Config = TypeVar("_Config")


A_DRAFT = "the folder or hub id of a draft model (reference:draft goes with reference:target)"


@dataclass(frozen=True)
class SpecConfig:
    """Who drafts, how much, and which rule decides.

    `drafter=None` is plain decoding, which takes nothing else (plain decoding under a rule of your choice is any
    drafter with `num_draft=0`). `draft` is the draft model's folder or hub id, maybe the target's own; `draft_dtype`
    the format of its weights: "auto" takes the target's option; "int8" and "int4" (CPU) read a half and a quarter of
    the bytes. `num_draft="auto"` leaves the number to the engine. `rule="auto"` is greedy at
    temperature 0, coupled when the request has a seed, otherwise block for sampled chains and tree for trees. Three
    ways to draft less, each exact because the mass handed over accounts for it:

    - `draft_probability` a: at each position draft only with probability a (mass a * q, also where nothing was
      drafted); "auto" lets the controller choose a from what drafting costs and gains.
    - `min_confidence` c: stop before a position where the draft's likeliest token has less than c.
    - `draft_top_k` k: draft from the k likeliest tokens of the draft only (0: from all).

    `draft_vocabulary` says how a draft model whose tokenizer is not the target's is used: not at all ("same"), in text
    that is encoded again ("strings"), in the tokens that both have ("intersection"), or by "auto": where the tokenizers
    agree as "same", else strings at temperature 0 and the intersection above.
    `tree` is the shape of what a draft model guesses, `num_draft` tokens in all: "chain"; "static", a tree of fixed
    shape; or "best_first", a tree that grows where the draft is surest. `branching` is the most children of a guess,
    one number or one for each depth (the tree is then no deeper); None: 4. Rules that judge chains only get a chain. In
    trees `min_confidence` leaves out the children of a guess; `draft_probability` is for chains.

    Drafter `predicted` drafts the request's `SamplingParams.prediction`, and only requests that have one can use it.
    Drafter `suffix` also guesses from the text file `corpus` and from finished answers of the same tenant
    (`SamplingParams.tenant`).

    Drafter `early_exit` is the target itself without some of its layers: its first `exit_layer` ones, or all but
    `skip_layers` (numbers from 0). "auto" learns from the answers how many, or which, give the most tokens per cost,
    and how far to guess.

    Drafter `lookahead` has the target run `lookahead_window` columns of `lookahead_ngram` - 1 tokens each beside its
    guesses, and collects runs of `lookahead_ngram` tokens from them: rows that cost what guesses cost
    (`stats.num_probed`).

    `parts` are the drafters that a composite drafter works with: names, or configurations of their own; a name takes
    over what is set here (`draft`, `corpus`, ...). A part's `num_draft` is the most it hands over at once. Without
    `parts` a composite drafter works with its usual ones, and `predicted` is among them for requests that have a
    prediction (`for_request`).

    - `cascade`: each part's guesses are verified by the next part, a draft model, exactly; the last one's tokens are
      the guesses. Cheapest first; `ngram` under `draft_model` by default.
    - `mix`: several drafters for one request; `ngram`, `suffix`, `recycling`, and `draft_model` where there is a draft,
      by default. With `combine="best"` the one with the most expected tokens per
      second guesses, with `"merge"` the likeliest guesses of all of them form one tree (under rules that take chains
      only: best).
    - `auto`: the engine chooses anew in every round who guesses for which request, and how much, weighing all requests
      of the step together; `ngram`, `suffix`, and `draft_model` where there is a draft, by default.
    """

    drafter: str | None = None
    draft: str | None = None
    num_draft: int | Literal["auto"] = "auto"
    rule: str = "auto"
    allow_lossy: bool = False
    draft_probability: float | Literal["auto"] = 1.0
    min_confidence: float = 0.0
    draft_top_k: int = 0
    draft_dtype: str = "auto"
    draft_vocabulary: str = "auto"
    corpus: str | None = None
    exit_layer: int | Literal["auto"] = "auto"
    skip_layers: Sequence[int] | Literal["auto"] | None = None
    parts: Sequence[str | SpecConfig] = ()
    lookahead_window: int = _LOOKAHEAD["lookahead_window"]
    lookahead_ngram: int = _LOOKAHEAD["lookahead_ngram"]
    tree: str = "chain"
    branching: int | Sequence[int] | None = None
    combine: Literal["best", "merge"] = "best"

    def __post_init__(self) -> None:
        if self.drafter is not None and self.drafter not in known_drafters():
            near = difflib.get_close_matches(str(self.drafter).lower(), known_drafters(), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                "drafter",
                self.drafter,
                f"{hint}choose one of {', '.join(known_drafters())}, or None (leave it out) for plain decoding",
            )
        if self.draft is not None and (not isinstance(self.draft, str) or not self.draft):
            raise ConfigError("draft", self.draft, f"must be {A_DRAFT}")
        self._check_given_parts()
        self._check_nesting()
        if self.rule not in RULES:
            raise ConfigError("rule", self.rule, f"choose one of {', '.join(RULES)}")
        check_flag("allow_lossy", self.allow_lossy)
        if self.rule in LOSSY_RULES and not self.allow_lossy:
            raise ConfigError(
                "rule", self.rule, "changes the target's law (lossy); set allow_lossy=True if that is what you want"
            )
        if self.num_draft != "auto":
            check_whole("num_draft", self.num_draft, low=0, high=1024)
        if self.drafter is None:
            for name in ("num_draft", "rule"):
                if getattr(self, name) != "auto":
                    raise ConfigError(name, getattr(self, name), "nobody guesses: name a drafter, or leave it out")
        if self.draft is not None:
            self._needs("draft", "draft_model")
        if self.draft_dtype not in DRAFT_DTYPES:
            raise ConfigError("draft_dtype", self.draft_dtype, f"choose one of {', '.join(DRAFT_DTYPES)}")
        if self.draft_dtype != "auto":
            self._needs("draft_dtype", "draft_model")
        if self.draft_vocabulary not in DRAFT_VOCABULARIES:
            raise ConfigError(
                "draft_vocabulary", self.draft_vocabulary, f"choose one of {', '.join(DRAFT_VOCABULARIES)}"
            )
        if self.draft_vocabulary != "auto":
            self._needs("draft_vocabulary", "draft_model")
        self._check_drafting_less()
        self._check_tree()
        self._check_texts()
        self._check_layers()
        self._check_lookahead()
        if self.combine not in COMBINE:
            raise ConfigError("combine", self.combine, f"choose one of {', '.join(COMBINE)}")
        if self.combine != "best" and self.drafter != "mix":
            raise ConfigError("combine", self.combine, f"only drafter='mix' takes it, not drafter={self.drafter!r}")
        if self.drafter in COMPOSITES:
            self._check_parts()

    @property
    def shape_follows_draws(self) -> bool:
        """Whether the shape of a draft may depend on what was drawn on the way: a model's trees, merged trees."""
        return self.tree != "chain" or self.combine == "merge" or any(part.shape_follows_draws for part in self.configs)

    @cached_property
    def configs(self) -> tuple[SpecConfig, ...]:
        """The parts as configurations: `parts`, or the usual ones of a composite drafter."""
        if self.parts:
            return tuple(part for part in self.parts if isinstance(part, SpecConfig))
        return tuple(self._part(name) for name in self._usual_parts())

    def for_request(self, prediction: str | Sequence[int] | None) -> SpecConfig:
        """The configuration under which a request with this prediction runs: `predicted` joins the usual parts.

        Raises:
            ConfigError: a prediction that no drafter takes, or `predicted` without one.
        """
        spec = self
        if prediction is not None and not self.parts and self.drafter in ("mix", "auto"):
            names = list(self._usual_parts())
            names.insert(names.index("draft_model") if "draft_model" in names else len(names), "predicted")
            spec = replace(self, parts=tuple(names))
        if prediction is not None and "predicted" not in spec.leaves:
            raise self._only_for("prediction", prediction, "predicted")
        if prediction is None and "predicted" in spec.leaves:
            raise ConfigError(
                "prediction", None, "drafter='predicted' needs the text that you expect: set SamplingParams.prediction"
            )
        return spec

    def at_most(self, count: int) -> int:
        """`count`, or `num_draft` where that is a smaller number."""
        return count if self.num_draft == "auto" else min(count, self.num_draft)

    @cached_property
    def arms(self) -> tuple[SpecConfig, ...]:
        """The configurations of which one guesses in a round: the parts of `auto`, else this one; none for plain
        decoding.
        """
        if self.drafter == "auto":
            return self.configs
        return () if self.drafter is None else (self,)

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the simple drafters at work: the drafter itself, or those that its parts come down to."""
        if not self.configs:
            return frozenset() if self.drafter is None else frozenset({self.drafter})
        return frozenset(name for part in self.configs for name in part.leaves)

    @property
    def num_probe(self) -> int:
        """Rows beside its guesses that the drafter may want from the target in one round."""
        if self.drafter == "lookahead":
            return self.lookahead_window * (self.lookahead_ngram - 1)
        return 0

    def _needs(self, field: str, drafter: str) -> None:
        """Refuse `field` where `drafter` is not at work."""
        if drafter not in self.leaves:
            raise self._only_for(field, getattr(self, field), drafter)

    def _only_for(self, field: str, value: object, drafter: str) -> ConfigError:
        """The error for an option that only `drafter` takes, which is not at work here."""
        others = ", ".join(str(part.drafter) for part in self.configs)
        remedy = f" (parts: {others}): name {drafter} among the parts" if others else f": name {drafter} as the drafter"
        return ConfigError(
            field,
            value,
            f"only drafter={drafter!r} takes it, not drafter={self.drafter!r}{remedy}, or leave it out",
        )

    def _check_given_parts(self) -> None:
        """Make every given part a configuration."""
        if self.parts and self.drafter not in COMPOSITES:
            raise ConfigError(
                "parts",
                self.parts,
                f"drafter={self.drafter!r} has no parts; composite drafters: {', '.join(COMPOSITES) or 'none'}",
            )
        if isinstance(self.parts, str) or not isinstance(self.parts, list | tuple):
            raise ConfigError("parts", self.parts, "must be a list of drafters")
        parts: list[SpecConfig] = []
        for part in self.parts:
            if not isinstance(part, str | SpecConfig):
                raise ConfigError("parts", part, "each must be the name of a drafter or a SpecConfig")
            parts.append(self._part(part) if isinstance(part, str) else part)
            if parts[-1].drafter is None:
                raise ConfigError("parts", part, "names no drafter")
        object.__setattr__(self, "parts", tuple(parts))

    def _part(self, name: str) -> SpecConfig:
        """The part called `name`, which takes over the fields that its drafter reads."""
        return SpecConfig(name, **{field: getattr(self, field) for field in FIELDS_OF.get(name, ())})

    def _check_nesting(self) -> None:
        """Only a cascade may be a part."""
        for part in self.configs:
            if part.drafter in (self.drafter, "mix", "auto"):
                nests = self.drafter == "cascade" and part.drafter != "cascade"
                remedy = f"put the cascade into the {part.drafter}" if nests else "name its parts here"
                raise ConfigError(
                    "parts", part.drafter, f"cannot be a part of drafter={self.drafter!r}; {remedy} instead"
                )

    def _usual_parts(self) -> tuple[str, ...]:
        """What a composite drafter works with unless told otherwise; nothing for a simple one."""
        if self.drafter == "cascade":
            return ("ngram", "draft_model")
        usual = {"auto": ("ngram", "suffix"), "mix": ("ngram", "suffix", "recycling")}.get(str(self.drafter), ())
        return (*usual, "draft_model") if usual and self.draft is not None else usual

    def _check_parts(self) -> None:
        """What parts may be, and that nothing set here or there is left without effect."""
        for part in self.configs:
            if part.rule != "auto":
                raise ConfigError(
                    "rule", part.rule, f"one rule decides for all parts; set it beside drafter={self.drafter!r}"
                )
            if part.drafter == "draft_model" and part.draft is None:
                raise ConfigError("draft", None, f"part 'draft_model' of drafter={self.drafter!r} needs {A_DRAFT}")
            if part.draft_probability != self.draft_probability and not part.leaves.isdisjoint(SAMPLERS):
                raise ConfigError(
                    "draft_probability",
                    part.draft_probability,
                    f"must be the same beside drafter={self.drafter!r} and in its parts",
                )
        neutral = {field.name: field.default for field in fields(self)}
        for field in dict.fromkeys(name for names in FIELDS_OF.values() for name in names):
            value = getattr(self, field)
            if value != neutral[field] and all(getattr(part, field) != value for part in self.configs):
                raise ConfigError(
                    field,
                    value,
                    "no part takes it over, because each that could is a configuration of its own; set it there",
                )
        if self.drafter == "cascade":
            self._check_levels()
        elif any(part.num_probe for part in self.configs):
            raise ConfigError(
                "parts",
                "lookahead",
                "its window runs in every round, also when another part guesses: use drafter='lookahead' alone",
            )
        elif self.combine == "merge" and any(part.tree != "chain" for part in self.configs):
            raise ConfigError(
                "tree",
                self.tree,
                "what is merged with other guesses must be a chain; use combine='best' for a model's trees",
            )
        elif self.combine == "merge" and sum(part.drafter not in LOOKUPS for part in self.configs) > 1:
            raise ConfigError(
                "combine",
                self.combine,
                "one part at most may ask a model when trees are merged; name one, or use combine='best'",
            )

    def _check_levels(self) -> None:
        names = [part.drafter for part in self.configs]
        if len(names) < 2:
            raise ConfigError(
                "parts", names, "a cascade has two levels at least, cheapest first, such as ('ngram', 'draft_model')"
            )
        for name in names[1:]:
            if name != "draft_model":
                raise ConfigError(
                    "parts", name, "every level of a cascade above the first verifies, so it must be a draft_model"
                )
        if names[0] not in ("draft_model", *LOOKUPS):
            raise ConfigError(
                "parts", names[0], f"the first level of a cascade must be one of draft_model, {', '.join(LOOKUPS)}"
            )
        for part in self.configs:
            if part.tree != "chain":
                raise ConfigError("tree", part.tree, "a cascade drafts chains; leave it at 'chain'")
            if part.draft_vocabulary not in ("auto", "same"):
                raise ConfigError(
                    "draft_vocabulary",
                    part.draft_vocabulary,
                    "all levels of a cascade share the target's tokens; leave it at 'auto'",
                )
        if self.draft_probability != 1:
            raise ConfigError(
                "draft_probability", self.draft_probability, "a cascade drafts every position; leave it at 1"
            )

    def _check_texts(self) -> None:
        for name in ("draft", "corpus"):
            value = getattr(self, name)
            if isinstance(value, str):
                check_text(name, value)
        if self.corpus is not None and (not isinstance(self.corpus, str) or not self.corpus):
            raise ConfigError("corpus", self.corpus, "must be the name of a text file")
        if self.corpus:
            self._needs("corpus", "suffix")

    def _check_lookahead(self) -> None:
        check_whole("lookahead_window", self.lookahead_window, low=1, high=64)
        check_whole("lookahead_ngram", self.lookahead_ngram, low=2, high=16)
        for name, default in _LOOKAHEAD.items():
            if getattr(self, name) != default:
                self._needs(name, "lookahead")

    def _check_tree(self) -> None:
        if self.tree not in TREES:
            raise ConfigError("tree", self.tree, f"choose one of {', '.join(TREES)}")
        if self.tree != "chain":
            self._needs("tree", "draft_model")
            if self.draft_probability != 1.0:
                raise ConfigError(
                    "draft_probability", self.draft_probability, f"is for chains; leave it at 1 with tree={self.tree!r}"
                )
        if self.branching is None:
            return
        if self.tree == "chain":
            raise ConfigError(
                "branching", self.branching, "a chain does not branch; choose tree='static' or tree='best_first'"
            )
        if isinstance(self.branching, list | tuple):
            object.__setattr__(self, "branching", tuple(self.branching))
        by_depth = self.branching if isinstance(self.branching, tuple) else (self.branching,)
        if not by_depth:
            raise ConfigError("branching", self.branching, "give a number, or one for each depth")
        for number in by_depth:
            check_whole("branching", number, low=1, high=64)

    def _check_drafting_less(self) -> None:
        if self.draft_probability != "auto":
            check_number("draft_probability", self.draft_probability, low=0.0, high=1.0, open_low=True)
        check_number("min_confidence", self.min_confidence, low=0.0, high=1.0)
        check_whole("draft_top_k", self.draft_top_k, low=0)
        for name, neutral in (("draft_probability", 1.0), ("min_confidence", 0.0), ("draft_top_k", 0)):
            value = getattr(self, name)
            if value != neutral and self.leaves.isdisjoint(SAMPLERS):
                without = (
                    ""
                    if self.drafter is None
                    else f", and drafter={self.drafter!r} has none; choose one, or leave it out"
                )
                raise ConfigError(
                    name, value, f"needs a drafter that samples from a law ({', '.join(SAMPLERS)}){without}"
                )

    def _check_layers(self) -> None:
        if self.exit_layer != "auto":
            check_whole("exit_layer", self.exit_layer, low=1)
            self._needs("exit_layer", "early_exit")
        if self.skip_layers is None:
            return
        self._needs("skip_layers", "early_exit")
        if self.exit_layer != "auto":
            raise ConfigError(
                "skip_layers",
                self.skip_layers,
                f"stop early (exit_layer={self.exit_layer}) or leave layers out, not both",
            )
        if self.skip_layers == "auto":
            return
        if isinstance(self.skip_layers, str) or not isinstance(self.skip_layers, list | tuple) or not self.skip_layers:
            raise ConfigError(
                "skip_layers", self.skip_layers, "must be 'auto' or a list of layer numbers, and not empty"
            )
        for layer in self.skip_layers:
            check_whole("skip_layers", layer, low=0)
        object.__setattr__(self, "skip_layers", tuple(sorted(set(self.skip_layers))))


_ADDED: list[str] = []  # names of drafters from outside, in the order in which they came


def known_drafters() -> tuple[str, ...]:
    """Every name that `SpecConfig.drafter` may have: our own drafters, then those added by `foretoken.add_drafter`."""
    return (*DRAFTERS, *_ADDED)


def know_drafter(name: str) -> None:
    """Let `SpecConfig` take the name of a drafter from outside.

    Raises:
        ConfigError: the name is one of ours, or not an identifier.
    """
    if name in DRAFTERS or not isinstance(name, str) or not name.isidentifier():
        raise ConfigError("name", name, f"choose an identifier that is none of {', '.join(DRAFTERS)}")
    if name not in _ADDED:
        _ADDED.append(name)


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config from a mapping; an unknown key is an error that names the nearest known one.

    Raises:
        ConfigError: unknown key.
    """
    for key, value in values.items():
        check_option(kind, key, value)
    return kind(**values)


def check_option(kind: type, key: str, value: object) -> None:
    """Refuse an option that the configuration `kind` does not have.

    Raises:
        ConfigError: names the nearest option that exists.
    """
    known = [field.name for field in fields(kind)]
    if key not in known:
        for other in (SamplingParams, SpecConfig):
            if key in {field.name for field in fields(other)}:
                raise ConfigError(key, value, f"is a field of {other.__name__}, not of {kind.__name__}")
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
        raise ConfigError(key, value, f"unknown option of {kind.__name__}; {hint}")
