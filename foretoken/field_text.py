"""Values of dataclass fields written as text, as flags and `--drafters` have them, lists with commas, and
configurations from named values.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

from foretoken.config import SamplingParams, SpecConfig
from foretoken.errors import ConfigError

_Config = TypeVar("_Config")
_Number = TypeVar("_Number", int, float)
_Item = TypeVar("_Item")
_TRUTHS = {"true": True, "false": False}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def parse_field(kind: type, field: str, text: str, separator: str = ",") -> Any:  # noqa: ANN401 - whatever the field holds
    """`text` as a value of a field of the dataclass `kind`: the first of the field's types that it can be.

    Tried are fixed words, true and false, numbers, texts, then lists with `separator` between their items.

    Raises:
        ConfigError: it is none of these.
    """
    hint = typing.get_type_hints(kind)[field]
    types_ = union_members(hint)
    words = [str(word) for one in types_ if typing.get_origin(one) is typing.Literal for word in typing.get_args(one)]
    if text in words:
        return text
    if bool in types_ and text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    for number in (int, float):
        if number in types_:
            try:
                return number(text)
            except ValueError:
                continue
    if str in types_:
        return text
    expected = [*(_WORDS[one] for one in types_ if one in _WORDS), *words]
    lists = [one for one in types_ if typing.get_origin(one) not in (None, typing.Literal, types.UnionType)]
    if lists:
        return _parse_list(field, text, lists[0], separator, expected)
    raise ConfigError(field, text, f"must be {' or '.join(expected)}")


def union_members(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - an annotation
    """The types of a union, or the only one."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _parse_list(field: str, text: str, kind: object, separator: str, expected: list[str]) -> tuple[Any, ...]:
    items = tuple(item.strip() for item in text.split(separator) if item.strip())
    if int not in typing.get_args(kind):
        return items
    try:
        return tuple(int(item) for item in items)
    except ValueError:
        ways = " or ".join([*expected, f"whole numbers with {separator} between them"])
        raise ConfigError(field, text, f"must be {ways}") from None


def words(name: str, text: str) -> tuple[str, ...]:
    """The items of a comma-separated list, each once: none is measured twice.

    Raises:
        ConfigError: it is empty.
    """
    found = _each_once(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise ConfigError(name, text, "name at least one, several separated by commas; or leave it out")
    return found


def wholes(name: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a comma-separated list, each once.

    Raises:
        ConfigError: none, or something else.
    """
    remedy = "must be whole numbers separated by commas"
    return _each_once(_number(name, word, int, remedy) for word in words(name, text))


def wholes_or_auto(name: str, text: str) -> tuple[int | Literal["auto"], ...]:
    """The same, of which "auto" may be one."""
    return _each_once("auto" if word == "auto" else wholes(name, word)[0] for word in words(name, text))


def numbers(name: str, text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list, each once.

    Raises:
        ConfigError: it is empty, or holds something else.
    """
    return _each_once(_number(name, word, float, "must be numbers separated by commas") for word in words(name, text))


def _each_once(items: Iterable[_Item]) -> tuple[_Item, ...]:
    return tuple(dict.fromkeys(items))


def _number(name: str, word: str, kind: Callable[[str], _Number], remedy: str) -> _Number:
    try:
        return kind(word)
    except ValueError:
        raise ConfigError(name, word, remedy) from None


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Build a config from a mapping; an unknown key is a `ConfigError` that names the nearest known one."""
    for key, value in values.items():
        check_option(kind, key, value)
    return kind(**values)


def check_option(kind: type, key: str, value: object) -> None:
    """Refuse (`ConfigError`) an option that the configuration `kind` does not have; the nearest one is named."""
    known = [field.name for field in fields(kind)]
    if key not in known:
        for other in (SamplingParams, SpecConfig):
            if key in {field.name for field in fields(other)}:
                raise ConfigError(key, value, f"is a field of {other.__name__}, not of {kind.__name__}")
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
        raise ConfigError(key, value, f"unknown option of {kind.__name__}; {hint}")
