"""Which drafters exist: one line each in `DRAFTERS`, and those that a program added with `add_drafter`.

The table names classes by import strings, so that configurations can be checked without importing torch.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from foretoken.errors import ConfigError

PLAIN = "none"  # in texts, the name of no drafter: plain decoding
_SAMPLING = ("draft_probability", "min_confidence", "draft_top_k")  # fields of drafters that sample


@dataclass(frozen=True)
class Traits:
    """What the package knows of a drafter before its module is imported.

    `source` is "module:Class", a class, or a function. A class is made by its classmethod `make(factory, spec)`, a
    function is called with `(factory, spec)`. None: the engine itself chooses among the parts.
    """

    source: str | Callable[..., Any] | None
    samples: bool = False  # draft tokens are sampled from a distribution; otherwise they are deterministic
    composite: bool = False  # works with the drafters in `SpecConfig.parts`
    fields: tuple[str, ...] = ()  # of `SpecConfig` that it reads
    # Dataclass of its own options, or "module:Class" of one that is checked without importing `source`; None: the
    # attribute `Options` of `source`, if any.
    options: str | type | None = None
    limit_s: float | None = None  # longest time of one call; None: not limited

    @property
    def is_lookup(self) -> bool:
        """Whether its draft tokens are deterministic and its own."""
        return not self.samples and not self.composite


DRAFTERS: dict[str, Traits] = {
    "draft_model": Traits(
        "foretoken.draft.draft_model:DraftModelDrafter",
        samples=True,
        fields=("draft", "draft_dtype", "draft_vocabulary", *_SAMPLING, "tree", "branching"),
    ),
    "ngram": Traits("foretoken.draft.ngram:NgramDrafter"),
    "suffix": Traits(
        "foretoken.draft.suffix:SuffixDrafter",
        fields=("corpus", "ngram_table"),
        options="foretoken.draft.suffix_options:SuffixOptions",
    ),
    "recycling": Traits("foretoken.draft.recycling:RecyclingDrafter"),
    "predicted": Traits("foretoken.draft.predicted:PredictedDrafter"),
    "early_exit": Traits(
        "foretoken.draft.early_exit:EarlyExitDrafter",
        samples=True,
        fields=("head", "exit_layer", "skip_layers", *_SAMPLING),
    ),
    **{
        name: Traits(
            f"foretoken.draft.{name}:{kind}",
            samples=True,
            fields=("head", "draft_dtype", *_SAMPLING, "tree", "branching"),
        )
        for name, kind in (("eagle", "EagleDrafter"), ("medusa", "MedusaDrafter"), ("block", "BlockDrafter"))
    },
    "mtp": Traits(
        "foretoken.draft.eagle:MtpDrafter", samples=True, fields=("draft_dtype", *_SAMPLING, "tree", "branching")
    ),
    "lookahead": Traits("foretoken.draft.lookahead:LookaheadDrafter", fields=("lookahead_window", "lookahead_ngram")),
    "cascade": Traits(
        "foretoken.draft.cascade:CascadeDrafter", composite=True, fields=("draft", "draft_dtype", *_SAMPLING)
    ),
    "mix": Traits("foretoken.draft.mix:MixDrafter", composite=True),
    "auto": Traits(None, composite=True),
}
HEADS = ("eagle", "medusa", "block")  # drafters of trained heads
HEAD_KINDS = (*HEADS, "early_exit")  # those that may run a `SpecConfig.head`: the last one with a trained adapter
MTP = "mtp"  # the drafter of a layer that only some targets bring
ADDED: dict[str, Traits] = {}  # by `add_drafter`, in the order in which they came


class FrozenOptions(Mapping[str, Any]):
    """A mapping that can be hashed and pickled."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = tuple(sorted((items or {}).items()))

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401 - whatever the drafter's dataclass takes
        return dict(self._items)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


def known_drafters() -> tuple[str, ...]:
    """Every name that `SpecConfig.drafter` may have: those of the package, then the added ones."""
    return (*DRAFTERS, *ADDED)


def traits_of(name: str) -> Traits:
    """The traits of a known drafter."""
    return DRAFTERS[name] if name in DRAFTERS else ADDED[name]


def add_traits(name: str, traits: Traits) -> None:
    """Register a drafter that is not part of the package; the same name again replaces it.

    Raises:
        ConfigError: the name is one of the package's, or not an identifier.
    """
    if name in (*DRAFTERS, PLAIN) or not isinstance(name, str) or not name.isidentifier():
        raise ConfigError("name", name, f"choose an identifier that is none of {', '.join((*DRAFTERS, PLAIN))}")
    ADDED[name] = traits


def load_source(name: str) -> Any:  # noqa: ANN401 - a class or a function
    """The class or function that makes a drafter, imported if need be."""
    source = traits_of(name).source
    return _imported(source) if isinstance(source, str) else source


def _imported(source: str) -> Any:  # noqa: ANN401 - whatever "module:attribute" names
    module, _, attribute = source.partition(":")
    return getattr(importlib.import_module(module), attribute)


def options_class(name: str) -> type | None:
    """The dataclass of a drafter's own options, None if it has none."""
    found = traits_of(name).options or getattr(load_source(name), "Options", None)
    found = _imported(found) if isinstance(found, str) else found
    assert found is None or is_dataclass(found), f"options of {name} are not a dataclass"
    return found


def check_options(name: str, given: Mapping[str, Any]) -> FrozenOptions:
    """`given` as options of a drafter, checked by its dataclass; lists become tuples.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), or a value that the dataclass refuses.
    """
    if not given:
        return FrozenOptions()
    kind = options_class(name)
    known = {} if kind is None else {field.name: field.metadata.get("help") for field in fields(kind)}
    for key, value in given.items():
        if not isinstance(key, str):
            raise ConfigError("options", key, "an option is named by a text")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            described = ", ".join(name if words is None else f"{name} ({words})" for name, words in known.items())
            hint = f"did you mean {near[0]!r}?" if near else f"its options: {described or 'none'}"
            raise ConfigError(key, value, f"unknown option of drafter={name!r}; {hint}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if kind is not None:
        kind(**values)
    return FrozenOptions(values)
