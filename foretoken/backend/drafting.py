"""The drafters of a bench run, as they are written on the command line: `name` or `name:field=value;field=value`, where
the fields are those of `SpecConfig` and the drafter's own options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from foretoken.config import SpecConfig
from foretoken.errors import ConfigError
from foretoken.field_text import check_option, parse_field
from foretoken.heads.kind import with_head_kind
from foretoken.model.names import REFERENCE_PREFIX, reference_heads
from foretoken.registry import HEADS, MTP, FrozenOptions, known_drafters, options_class, traits_of

EVERY = "all"
# Every drafter at each of these numbers of draft tokens, and the trees of a draft model: what is called the best fixed
# setting is the best of these.
SWEEP = "sweep"
SWEEP_NUM_DRAFTS = (2, 3, 5, 8)
_SWEPT_TREES = ("static", "best_first")
AUTO_DRAFTER = "auto"
# What the bench itself gives for each answer, and what one flag of the bench sets for all drafters.
_GIVEN_BY_BENCH = {
    "drafter": "it is the name before the colon",
    "prediction": "it comes with each prompt",
    "tenant": "every answer gets its own",
    "allow_lossy": "set it for the whole run",
    "options": "name each option by itself",
}
_DRAFT: Mapping[str, str] = {"draft": "a draft"}  # stands for a draft that comes later
_LIST_SEPARATOR = "+"  # a comma separates drafters


@dataclass(frozen=True)
class DrafterChoice:
    """One drafter with its options. `required` is False where it was only part of `all`: then it may turn out to be
    unusable here.
    """

    name: str
    fields: tuple[tuple[str, Any], ...] = ()
    required: bool = True

    @property
    def options(self) -> str:
        """The options as they were written, without the number of draft tokens and the rule, which the name shows."""
        shown = [pair for pair in self.fields if pair[0] not in ("num_draft", "rule", "options")]
        shown += (self.own("options") or FrozenOptions()).items()
        return ";".join(f"{field}={_written(value)}" for field, value in shown)

    @property
    def label(self) -> str:
        """Name and options."""
        return self.name + (f"({self.options})" if self.options else "")

    def own(self, field: str) -> Any | None:  # noqa: ANN401 - whatever SpecConfig holds there
        """The value of `field`, if this choice sets it."""
        return dict(self.fields).get(field)

    @property
    def models(self) -> tuple[str, ...]:
        """The draft model and the head that only this choice names."""
        return tuple(value for field, value in self.fields if field in ("draft", "head"))

    @property
    def files(self) -> tuple[str, ...]:
        """The corpus and the n-gram table that this choice names."""
        return tuple(value for field, value in self.fields if field in ("corpus", "ngram_table"))

    @cached_property
    def takes(self) -> frozenset[str]:
        """Whether its configuration takes a draft, and its requests a prediction, given or not."""
        found = {"draft": self._refusal(_DRAFT) is None, "prediction": self._runs_with("a prediction")}
        return frozenset(name for name, is_taken in found.items() if is_taken)

    @cached_property
    def needs(self) -> frozenset[str]:
        """What it cannot do without and was not given: without it the configuration is refused, or a model to load is
        missing.
        """
        reads_draft = self._least.draft is not None or any("draft" in traits_of(leaf).fields for leaf in self.leaves)
        found = {"draft": reads_draft and self.own("draft") is None, "prediction": not self._runs_with(None)}
        return frozenset(name for name, is_needed in found.items() if is_needed)

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Names of the simple drafters at work when it gets no more than it needs."""
        return with_head_kind(self._least).leaves

    def check(self) -> None:
        """Refuse options that this drafter does not take.

        Raises:
            ConfigError: names the option.
        """
        refused, with_draft = self._refusal({}), self._refusal(_DRAFT)
        if refused is not None and with_draft is not None:
            raise (
                with_draft
                if with_draft.field in dict(self.fields) and refused.field not in dict(self.fields)
                else refused
            )

    @cached_property
    def _least(self) -> SpecConfig:
        """The configuration with the least that it is accepted with."""
        return self.spec(allow_lossy=True, **({} if self._refusal({}) is None else _DRAFT))

    def _runs_with(self, prediction: str | None) -> bool:
        """Whether requests with this prediction, or with none, can use it."""
        try:
            self._least.for_request(prediction)
        except ConfigError:
            return False
        return True

    def _refusal(self, given: Mapping[str, str]) -> ConfigError | None:
        try:
            self.spec(allow_lossy=True, **given)
        except ConfigError as error:
            return error
        return None

    def spec(self, **given: object) -> SpecConfig:
        """The configuration with these options; of `given`, what is None is left out, and the options win.

        Raises:
            ConfigError: the options contradict each other, or something that the drafter needs is missing.
        """
        values: dict[str, Any] = {key: value for key, value in given.items() if value is not None} | dict(self.fields)
        return SpecConfig(drafter=self.name, **values)


def parse_drafters(texts: Sequence[str]) -> tuple[DrafterChoice, ...]:
    """The drafters that `texts` name; `all` stands for every registered drafter that is not named without options,
    `sweep` for each with every fixed number of draft tokens (`swept_drafters`). A trained head has to be named with its
    folder.

    Raises:
        ConfigError: an unknown drafter or option, or a value of the wrong kind.
    """
    named = [_parse(text) for text in texts if text not in (EVERY, SWEEP)]
    if SWEEP in texts:
        named += swept_drafters()
    if EVERY not in texts:
        return tuple(dict.fromkeys(named))
    others = [DrafterChoice(name, required=False) for name in _without_files() if DrafterChoice(name) not in named]
    return (*dict.fromkeys(named), *others)


def _without_files() -> list[str]:
    """Drafters that need no trained head, nor a layer that few targets bring."""
    return [name for name in known_drafters() if name not in (*HEADS, MTP)]


def swept_drafters() -> tuple[DrafterChoice, ...]:
    """Every registered drafter but `auto` at each of `SWEEP_NUM_DRAFTS`, a draft model also with trees."""
    kinds: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
        (name, ()) for name in _without_files() if name != AUTO_DRAFTER
    ]
    kinds += [("draft_model", (("tree", tree),)) for tree in _SWEPT_TREES]
    return tuple(
        DrafterChoice(name, (*own, ("num_draft", number)), required=False)
        for name, own in kinds
        for number in SWEEP_NUM_DRAFTS
    )


def _parse(text: str) -> DrafterChoice:
    name, _, options = text.partition(":")
    if name not in known_drafters():
        raise ConfigError("drafters", name, f"choose from {', '.join(known_drafters())}, or {EVERY}")
    kind = options_class(name) if options else None
    own_options = [] if kind is None else [field.name for field in fields(kind)]
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(";"))):
        field, equals, value = option.partition("=")
        if not equals:
            raise ConfigError("drafters", text, f"{option!r} must be field=value; a semicolon separates several")
        if field in _GIVEN_BY_BENCH:
            raise ConfigError("drafters", text, f"{field} cannot be set here: {_GIVEN_BY_BENCH[field]}")
        if kind is not None and field in own_options:
            own[field] = parse_field(kind, field, value, _LIST_SEPARATOR)
            continue
        check_option(SpecConfig, field, value)
        found[field] = parse_field(SpecConfig, field, value, _LIST_SEPARATOR)
    if own:
        found["options"] = FrozenOptions(own)
    if name in HEADS and "head" not in found:
        here = [head for head in reference_heads() if head.endswith(f":{name}")]
        known = f" (in this checkout {here[0]}, for {REFERENCE_PREFIX}target)" if here else ""
        remedy = f"needs the folder or hub id of a trained head: {name}:head=DIR{known}; foretoken train makes one"
        raise ConfigError("drafters", text, remedy)
    choice = DrafterChoice(name, tuple(found.items()))
    choice.check()
    return choice


def _written(value: object) -> str:
    return (
        "+".join(map(str, value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
