"""What a user may set: frozen dataclasses that check themselves.

Every field is honoured exactly or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from foretoken.errors import ConfigError
from foretoken.option import Settings, check_fields
from foretoken.params import SamplingParams as SamplingParams
from foretoken.params import check_flag, check_no_arrays, check_whole
from foretoken.registry import DRAFTERS as DRAFTERS
from foretoken.registry import HEAD_KINDS, HEADS, FrozenOptions, check_options, traits_of
from foretoken.registry import PLAIN as PLAIN
from foretoken.registry import known_drafters as known_drafters
from foretoken.spec_checks import (
    NO_TABLE,
    PACKAGED_TABLE,
    check_draft,
    check_drafting_less,
    check_lookahead,
    check_names,
    check_nesting,
    check_parts,
    check_read,
    check_table,
    check_texts,
    is_lookup,
    leaves_of,
    only_for,
)

QUANTISED: tuple[str, ...] = ("int8", "int4")
WEIGHTS: tuple[str, ...] = ("auto", *QUANTISED)
DRAFT_DTYPES: tuple[str, ...] = ("auto", "bfloat16", "float16", "float32", *QUANTISED)
# With n-grams of three tokens eight rows of probes, which a CPU runs for little more than the time of one row.
LOOKAHEAD_WINDOW = 4
DTYPES: tuple[str, ...] = ("auto", "float32", "float16", "bfloat16", "float64")
NUMERICS: tuple[str, ...] = ("default", "strict")
CACHE_DTYPES: tuple[str, ...] = ("auto", "model", "float16")
TREES: tuple[str, ...] = ("chain", "static", "best_first")
RULES: tuple[str, ...] = ("auto", "greedy", "rejection", "block", "coupled", "tree", "traversal", "typical")
DRAFT_VOCABULARIES: tuple[str, ...] = ("auto", "same", "strings", "intersection")
LOSSY_RULES: tuple[str, ...] = ("typical",)
COMPOSITES: tuple[str, ...] = tuple(name for name, traits in DRAFTERS.items() if traits.composite)

DRAFTING = "Drafting"  # the group of these options

_setting = Settings(DRAFTING)


def _drafters_help() -> str:
    return f"Which drafter runs; none for plain decoding. {', '.join(known_drafters())}, {PLAIN}."


@dataclass(frozen=True)
class SpecConfig:
    """Which drafter runs, how many tokens, and which rule verifies them.

    `drafter=None`, or "none", is plain decoding, which takes nothing else (plain decoding under a rule of your choice
    is any drafter with `num_draft=0`). `draft` is the draft model's folder or hub id, maybe the target's own;
    `draft_dtype` the format of its weights, or of a trained head's: "auto" takes the target's option and number of
    bits, for a head beside 16 bits on a CPU "int8"; "int8" and "int4" (CPU) read a half and a quarter of the bytes.
    `num_draft="auto"` leaves the number to the engine. `rule="auto"` is greedy at temperature 0, coupled when the
    request has a seed, otherwise block for sampled chains and tree for trees. Three ways to draft less, each exact
    because the mass of the draft accounts for it:

    - `draft_probability` a: at each position draft only with probability a (mass a * q, also where nothing was
      drafted); "auto" lets the engine choose among 0.25, 0.5, 0.75 and 1 in each round.
    - `min_confidence` c: stop before a position where the draft's most likely token has a probability below c.
    - `draft_top_k` k: draft only from the k most likely tokens of the draft model (0: from all).

    `head` is the folder or hub id of a trained head, which reads the target's hidden states: drafters `eagle` (EAGLE-1,
    -2, -3), `medusa` and `block`; `auto` and `mix` take the drafter that runs it as a part. For `early_exit` it is an
    adapter, which also decides on the exit. `head_kind` is the drafter that runs the head under `auto` and `mix`; with
    "auto" it is read from the head's files when drafters are loaded (`heads.kind.with_head_kind`), never by this class.

    `draft_vocabulary` says how a draft model whose tokenizer is not the target's is used: not at all ("same"), in text
    that is encoded again ("strings"), in the tokens that both have ("intersection"), or by "auto": where the tokenizers
    agree as "same", else strings at temperature 0 and the intersection above.
    `tree` is the shape of a draft model's draft, `num_draft` tokens in all: "chain"; "static", a tree of fixed
    shape; or "best_first", a tree that grows where the draft is most probable. `branching` is the largest number of
    children of a draft token, one number or one for each depth (the tree is then no deeper); None: 4. Rules for chains
    only get a chain. In trees `min_confidence` leaves out the children of a draft token; `draft_probability` is for
    chains.

    Drafter `predicted` drafts the request's `SamplingParams.prediction`, and only requests that have one can use it.
    Drafter `suffix` also drafts from the text file `corpus` and from finished answers of the same tenant
    (`SamplingParams.tenant`), and continues with the target's n-gram table: `ngram_table` is a file written by
    `foretoken train ngrams`, "packaged" for the table in the package for the target's tokenizer, if any, or "none".

    Drafter `early_exit` is the target itself without some of its layers: its first `exit_layer` ones, or all but
    `skip_layers` (numbers from 0). With `exit_layer="auto"` the engine chooses among a few exits in each round, with
    `skip_layers="auto"` the drafter searches for a set of layers while it runs.

    Drafter `lookahead` has the target run `lookahead_window` columns of `lookahead_ngram` - 1 tokens each beside its
    draft tokens, and collects runs of `lookahead_ngram` tokens from them: rows that cost what draft tokens cost
    (`stats.num_probed`). With "auto" the engine chooses in each round between a window of 4 columns and none.

    `options` are a drafter's own options, checked by its dataclass `Options`.

    `parts` are the drafters that a composite drafter works with: names, or configurations of their own; a name takes
    over what is set here (`draft`, `corpus`, ...). A part's `num_draft` is its maximum per round. Without
    `parts` a composite drafter works with its usual ones, and `predicted` is among them for requests that have a
    prediction (`for_request`).

    - `cascade`: the next part, a draft model, verifies each part's draft tokens exactly; the last part's tokens are
      the draft. Cheapest first; `ngram` under `draft_model` by default.
    - `mix`: the most likely draft tokens of all parts as one tree; under rules for chains only, the likelier chain.
      At most one part may run a model. `ngram`, `suffix`, `recycling`, and `draft_model` where there is a draft (or
      the drafter of a `head`), by default. To use one drafter at a time, the best one in each round: `auto`.
    - `auto`: in every round the engine chooses a drafter and a number of draft tokens for each request, jointly;
      `suffix`, `draft_model` where there is a draft, and the drafter of a `head`, by default.
    """

    drafter: str | None = _setting(None, _drafters_help)
    draft: str | None = _setting(None, "The draft model for --drafter draft_model: a folder, a GGUF file or a hub id.")
    num_draft: int | Literal["auto"] = _setting("auto", "How many tokens to draft per step: a number, or auto.")
    rule: str = _setting("auto", "Verification rule: {choices}.", choices=RULES)
    allow_lossy: bool = _setting(False, "Allow a rule that changes the target's distribution (typical).")
    draft_probability: float | Literal["auto"] = _setting(
        1.0, "Chance that a position is drafted at all: a number in (0, 1], or auto."
    )
    min_confidence: float = _setting(
        0.0, "Stop drafting where the draft's most likely token has a lower probability than this."
    )
    draft_top_k: int = _setting(0, "Draft from the draft model's k most likely tokens; 0 = all.")
    draft_dtype: str = _setting(
        "auto", "Format of a draft model's or head's weights: {choices}; auto follows the target.", choices=DRAFT_DTYPES
    )
    draft_vocabulary: str = _setting(
        "auto",
        "How to use a draft model with another tokenizer than the target's: {choices}.",
        choices=DRAFT_VOCABULARIES,
    )
    corpus: str | None = _setting(None, "A text file to draft from, for --drafter suffix.")
    ngram_table: str = _setting(
        PACKAGED_TABLE,
        f"The target's n-gram table, for --drafter suffix and auto: a file, {PACKAGED_TABLE} (the package's own "
        f"where it has one for this tokenizer), or {NO_TABLE}.",
    )
    exit_layer: int | Literal["auto"] = _setting(
        "auto", "Layers that draft, for --drafter early_exit: a number, or auto."
    )
    skip_layers: Sequence[int] | Literal["auto"] | None = _setting(
        None, "Layers to draft without, for --drafter early_exit: 2,3,5, or auto."
    )
    parts: Sequence[str | SpecConfig] = _setting(
        (), f"Drafters that {' or '.join(COMPOSITES)} works with: a,b,c, cheapest first."
    )
    lookahead_window: int | Literal["auto"] = _setting(
        "auto", "Columns of the window of --drafter lookahead: a number, or auto."
    )
    lookahead_ngram: int = _setting(3, "Length of the n-grams of --drafter lookahead.")
    tree: str = _setting("chain", "The shape of a draft model's draft: {choices}.", choices=TREES)
    branching: int | Sequence[int] | None = _setting(
        None, "Most children of a draft token in a tree: a number, or one for each depth, such as 4,2,1."
    )
    options: Mapping[str, Any] = _setting(
        FrozenOptions(),
        "An option of the drafter, as NAME=VALUE; may be given several times.",
        name="drafter_option",
        repeats=True,
    )
    head: str | None = _setting(None, "A trained head of the target: a folder or a hub id.")
    head_kind: str = "auto"

    def __post_init__(self) -> None:
        check_no_arrays(self)
        if self.drafter == PLAIN:
            object.__setattr__(self, "drafter", None)
        check_names(self)
        self._check_given_parts()
        check_nesting(self)
        check_fields(self)
        check_flag("allow_lossy", self.allow_lossy)
        if self.rule in LOSSY_RULES and not self.allow_lossy:
            remedy = "changes the target's distribution (lossy); set allow_lossy=True if you want that"
            raise ConfigError("rule", self.rule, remedy)
        if self.num_draft != "auto":
            check_whole("num_draft", self.num_draft, low=0, high=1024)
        if self.drafter is None:
            for name in ("num_draft", "rule"):
                if getattr(self, name) != "auto":
                    raise ConfigError(name, getattr(self, name), "nobody drafts: name a drafter, or leave it out")
        check_draft(self)
        check_drafting_less(self)
        self._check_tree()
        check_texts(self)
        check_table(self)
        self._check_layers()
        check_lookahead(self)
        self._check_options()
        if self.is_composite:
            check_parts(self)

    @property
    def is_composite(self) -> bool:
        """Whether the drafter works with `parts`."""
        return self.drafter is not None and traits_of(self.drafter).composite

    @property
    def shape_follows_draws(self) -> bool:
        """Whether a draft's shape may depend on tokens drawn in its round: a model's trees, and what `mix` merges."""
        merges = self.drafter == "mix" and not all(is_lookup(part) for part in self.configs)
        return self.tree != "chain" or merges or any(part.shape_follows_draws for part in self.configs)

    @cached_property
    def configs(self) -> tuple[SpecConfig, ...]:
        """The parts as configurations: `parts`, or the usual ones of a composite drafter.

        Raises:
            ConfigError: it is not known which drafter runs the head.
        """
        if self.needs_head_kind:
            remedy = "which drafter runs it is not known here: set head_kind, or use heads.kind.with_head_kind(spec)"
            raise ConfigError("head", self.head, remedy)
        return self.declared

    @cached_property
    def declared(self) -> tuple[SpecConfig, ...]:
        """`configs`; where it is not known which drafter runs the head, any drafter of heads stands for it."""
        if self.parts:
            return tuple(part for part in self.parts if isinstance(part, SpecConfig))
        return tuple(self._part(name) for name in self._usual_parts())

    @property
    def needs_head_kind(self) -> bool:
        """Whether the files of `head` say which drafter runs it (`heads.kind.with_head_kind`)."""
        return self.has_part_for_head and self.head_kind == "auto"

    def for_request(self, prediction: str | Sequence[int] | None) -> SpecConfig:
        """The configuration under which a request with this prediction runs: `predicted` joins the usual parts, once it
        is known which those are (`needs_head_kind`).

        Raises:
            ConfigError: a prediction that no drafter takes, or `predicted` without one.
        """
        spec, has_usual_parts = self, not self.parts and self.drafter in ("mix", "auto")
        if prediction is not None and has_usual_parts and self.needs_head_kind:
            return self
        if prediction is not None and has_usual_parts:
            names = list(self._usual_parts())
            models = [place for place, name in enumerate(names) if name in ("draft_model", *HEAD_KINDS)]
            names.insert(min(models, default=len(names)), "predicted")
            spec = replace(self, parts=tuple(names), head_kind="auto")
        takes_prediction = "predicted" in leaves_of(spec, spec.declared)
        if prediction is not None and not takes_prediction:
            raise only_for(self, "prediction", prediction, ["predicted"])
        if prediction is None and takes_prediction:
            remedy = "drafter='predicted' needs the text that you expect: set SamplingParams.prediction"
            raise ConfigError("prediction", None, remedy)
        return spec

    def at_most(self, count: int) -> int:
        """`count`, or `num_draft` where that is a smaller number."""
        return count if self.num_draft == "auto" else min(count, self.num_draft)

    @property
    def drafter_options(self) -> tuple[SpecConfig, ...]:
        """The configurations of which one runs in a round: the parts of `auto`, else this one; none for plain."""
        if self.drafter == "auto":
            return self.configs
        return () if self.drafter is None else (self,)  # kept, it would be a cycle: memory until a garbage collection

    @property
    def leaves(self) -> frozenset[str]:
        """Names of the simple drafters at work: the drafter itself, or those that its parts come down to."""
        return leaves_of(self, self.configs)

    @property
    def samples(self) -> bool:
        """Whether the drafter, or a part of it, samples draft tokens from a distribution."""
        return any(traits_of(name).samples for name in leaves_of(self, self.declared))

    @property
    def num_probe(self) -> int:
        """The largest number of probes that the drafter may ask of the target in one round, over all its variants."""
        if self.drafter != "lookahead":
            return 0
        window = LOOKAHEAD_WINDOW if self.lookahead_window == "auto" else self.lookahead_window
        return window * (self.lookahead_ngram - 1)

    def _check_given_parts(self) -> None:
        if self.parts and not self.is_composite:
            remedy = f"drafter={self.drafter!r} has no parts; composite drafters: {', '.join(COMPOSITES)}"
            raise ConfigError("parts", self.parts, remedy)
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
        taken = traits_of(name).fields if name in known_drafters() else ()
        values = {one: getattr(self, one) for one in taken}
        if name == "early_exit" and any(part in HEADS for part in self.parts):
            del values["head"]  # the other part's; this one also runs without
        return SpecConfig(name, **values)

    @property
    def has_part_for_head(self) -> bool:
        """Whether the drafter of `head` is one of the usual parts."""
        return self.head is not None and not self.parts and self.drafter in ("auto", "mix")

    def _usual_parts(self) -> tuple[str, ...]:
        """What a composite drafter works with unless told otherwise; see `declared`."""
        if self.drafter == "cascade":
            return ("ngram", "draft_model")
        usual = {"auto": ("suffix",), "mix": ("ngram", "suffix", "recycling")}.get(str(self.drafter), ())
        if not usual:
            return ()
        asked = ("draft_model",) if self.draft is not None else ()
        if self.head is None:
            return (*usual, *asked)
        return (*usual, *asked, HEADS[0] if self.head_kind == "auto" else self.head_kind)

    def _check_options(self) -> None:
        if not isinstance(self.options, Mapping):
            raise ConfigError("options", self.options, "must be a mapping, such as {'width': 3}")
        if self.drafter is None and self.options:
            raise ConfigError("options", dict(self.options), "are a drafter's: name a drafter, or leave them out")
        checked = FrozenOptions() if self.drafter is None else check_options(self.drafter, self.options)
        object.__setattr__(self, "options", checked)

    def _check_tree(self) -> None:
        if self.tree != "chain":
            check_read(self, "tree")
            if self.draft_probability != 1.0:
                remedy = f"is for chains; leave it at 1 with tree={self.tree!r}"
                raise ConfigError("draft_probability", self.draft_probability, remedy)
        if self.branching is None:
            return
        if self.tree == "chain":
            remedy = "a chain does not branch; choose tree='static' or tree='best_first'"
            raise ConfigError("branching", self.branching, remedy)
        if isinstance(self.branching, list | tuple):
            object.__setattr__(self, "branching", tuple(self.branching))
        by_depth = self.branching if isinstance(self.branching, tuple) else (self.branching,)
        if not by_depth:
            raise ConfigError("branching", self.branching, "give a number, or one for each depth")
        for number in by_depth:
            check_whole("branching", number, low=1, high=64)

    def _check_layers(self) -> None:
        if self.exit_layer != "auto":
            check_whole("exit_layer", self.exit_layer, low=1)
            check_read(self, "exit_layer")
        if self.drafter == "early_exit" and self.head is not None:
            for name, unset in (("exit_layer", "auto"), ("skip_layers", None)):
                if getattr(self, name) != unset:
                    remedy = "an adapter drafts from the layer it was trained for: leave it out beside `head`"
                    raise ConfigError(name, getattr(self, name), remedy)
        if self.skip_layers is None:
            return
        check_read(self, "skip_layers")
        if self.exit_layer != "auto":
            remedy = f"stop early (exit_layer={self.exit_layer}) or leave layers out, not both"
            raise ConfigError("skip_layers", self.skip_layers, remedy)
        if self.skip_layers == "auto":
            return
        if isinstance(self.skip_layers, str) or not isinstance(self.skip_layers, list | tuple) or not self.skip_layers:
            remedy = "must be 'auto' or a list of layer numbers, and not empty"
            raise ConfigError("skip_layers", self.skip_layers, remedy)
        for layer in self.skip_layers:
            check_whole("skip_layers", layer, low=0)
        object.__setattr__(self, "skip_layers", tuple(sorted(set(self.skip_layers))))
