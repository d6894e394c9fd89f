"""Drafters as the bench is told of them: `name` or `name:field=value;field=value`, where the fields are those of
`SpecConfig`.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foretoken.config import FIELDS_OF, SpecConfig, check_option, known_drafters
from foretoken.errors import ConfigError

EVERY = "all"
# What the bench itself gives for each answer, and what one flag of the bench sets for all drafters.
_GIVEN_BY_BENCH = {
    "drafter": "it is the name before the colon",
    "prediction": "it comes with each prompt",
    "tenant": "every answer gets its own",
    "allow_lossy": "set it for the whole run",
}
# What a configuration may be given, and the ways to be given as little as possible of it.
_STAND_INS: Mapping[str, str] = {"draft": "a draft"}
_BASES: tuple[tuple[str, ...], ...] = ((), ("draft",))
_TRUTHS = {"true": True, "false": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


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
        """The options as they were written, less the number of guesses and the rule, which the setting's name shows
        anyway.
        """
        return ";".join(
            f"{field}={_written(value)}" for field, value in self.fields if field not in ("num_draft", "rule")
        )

    @property
    def label(self) -> str:
        """Name and options."""
        return self.name + (f"({self.options})" if self.options else "")

    def own(self, field: str) -> Any | None:  # noqa: ANN401 - whatever SpecConfig holds there
        """The value of `field`, if this choice sets it."""
        return dict(self.fields).get(field)

    @cached_property
    def takes(self) -> frozenset[str]:
        """Whether its configuration takes a draft, and its requests a prediction, given or not."""
        drafts = {field for field in _STAND_INS if self._refusal({*self._base, field}) is None}
        return frozenset(drafts | ({"prediction"} if self._runs_with("a prediction") else set()))

    @cached_property
    def needs(self) -> frozenset[str]:
        """What it cannot do without and was not given: without it the configuration is refused, or a model to load is
        missing.
        """
        reads = {field for leaf in self.leaves for field in FIELDS_OF.get(leaf, ())}
        needs_draft = self.own("draft") is None and ("draft" in self._base or "draft" in reads)
        return frozenset(({"draft"} if needs_draft else set()) | (set() if self._runs_with(None) else {"prediction"}))

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Names of the simple drafters at work when it gets no more than it needs."""
        return self.spec(allow_lossy=True, **{field: _STAND_INS[field] for field in self._base}).leaves

    def check(self) -> None:
        """Refuse options that this drafter does not take.

        Raises:
            ConfigError: names the option.
        """
        errors = [error for given in _BASES if (error := self._refusal(given)) is not None]
        if len(errors) == len(_BASES):
            raise next((error for error in errors if error.field in dict(self.fields)), errors[0])

    @cached_property
    def _base(self) -> frozenset[str]:
        """The least with which the configuration is accepted."""
        return next((frozenset(given) for given in _BASES if self._refusal(given) is None), frozenset())

    def _runs_with(self, prediction: str | None) -> bool:
        """Whether requests with this prediction, or with none, can use it."""
        spec = self.spec(allow_lossy=True, **{field: _STAND_INS[field] for field in self._base})
        try:
            spec.for_request(prediction)
        except ConfigError:
            return False
        return True

    def _refusal(self, given: Collection[str]) -> ConfigError | None:
        try:
            self.spec(allow_lossy=True, **{field: _STAND_INS[field] for field in given})
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
    """The drafters that `texts` name; `all` stands for every registered drafter that is not named without options.

    Raises:
        ConfigError: an unknown drafter or option, or a value of the wrong kind.
    """
    named = [_parse(text) for text in texts if text != EVERY]
    if EVERY not in texts:
        return tuple(dict.fromkeys(named))
    others = [DrafterChoice(name, required=False) for name in known_drafters() if DrafterChoice(name) not in named]
    return (*dict.fromkeys(named), *others)


def _parse(text: str) -> DrafterChoice:
    name, _, options = text.partition(":")
    if name not in known_drafters():
        raise ConfigError("drafters", name, f"choose from {', '.join(known_drafters())}, or {EVERY}")
    found: dict[str, Any] = {}
    for option in filter(None, (part.strip() for part in options.split(";"))):
        field, equals, value = option.partition("=")
        if not equals:
            raise ConfigError("drafters", text, f"{option!r} must be field=value; a semicolon separates several")
        if field in _GIVEN_BY_BENCH:
            raise ConfigError("drafters", text, f"{field} cannot be set here: {_GIVEN_BY_BENCH[field]}")
        check_option(SpecConfig, field, value)
        found[field] = _value(field, value)
    choice = DrafterChoice(name, tuple(found.items()))
    choice.check()
    return choice


def _value(field: str, text: str) -> Any:  # noqa: ANN401 - whatever SpecConfig holds there
    """`text` as the first of the field's kinds that it can be: a fixed word, a truth, a number, a list (with +
    between), a text.
    """
    kind = typing.get_type_hints(SpecConfig)[field]
    arms = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    words = [str(word) for arm in arms if typing.get_origin(arm) is typing.Literal for word in typing.get_args(arm)]
    if text in words:
        return text
    if bool in arms and text in _TRUTHS:
        return _TRUTHS[text]
    for number in (int, float):
        if number in arms:
            try:
                return number(text)
            except ValueError:
                continue
    lists = [arm for arm in arms if typing.get_origin(arm) not in (None, typing.Literal, types.UnionType)]
    if lists and (str not in arms or "+" in text):
        return _list(field, text, lists[0])
    if str in arms:
        return text
    expected = [*words, *(_WORDS[arm] for arm in arms if arm in _WORDS)]
    raise ConfigError(field, text, f"must be {' or '.join(expected)}")


def _list(field: str, text: str, kind: object) -> tuple[Any, ...]:
    items = text.split("+")
    if int not in typing.get_args(kind):
        return tuple(items)
    try:
        return tuple(int(item) for item in items)
    except ValueError:
        raise ConfigError(field, text, "must be whole numbers with + between them") from None


def _written(value: object) -> str:
    return (
        "+".join(map(str, value))
        if isinstance(value, tuple)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
