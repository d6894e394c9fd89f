"""A JSON schema as llguidance takes it: a copy that asks for the same, and no word that it would follow otherwise."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

from foretoken.errors import InputError
from foretoken.params import check_text, plain_schema

_WHOLE = 2**63  # whole numbers of this size and more are read otherwise

VALUES = ("const", "enum")

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by any name

REMARKS = ("default", "examples", "example", "x-guidance")


def check_numbers(field: str, schema: object) -> None:
    """Refuse a schema with numbers that an answer could not be held to exactly.

    Raises:
        InputError: names `field` and the first such number.
    """
    for place, number in _found(schema):
        if place in VALUES:
            is_exact, remedy = _is_written(number), "write it as a text, or round it to 15 digits"
        else:
            is_exact, remedy = _is_bound(number, place in _LOW), "give one of at most 15 digits"
        if not is_exact:
            raise InputError(field, f"{place}: {number}", f"no 64-bit float is this number; {remedy}")


def parts(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and those inside it; each may be changed before the next one is asked for."""
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield one
            for key, value in one.items():
                if key in NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif key not in VALUES + REMARKS:
                    waiting.append(value)


def leaves(value: Any) -> Iterator[Any]:  # noqa: ANN401 - a JSON value
    """What stands in a JSON value and is no list or object."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | dict):
            waiting += one.values() if isinstance(one, dict) else one
        else:
            yield one


def _found(schema: object) -> Iterator[tuple[str, int | float]]:
    """The numbers that answers are held to, each with its keyword."""
    for one in parts(schema):
        for key in [key for key in one if key in VALUES + _LOW + _HIGH]:
            numbers = (own for own in leaves(one[key]) if isinstance(own, int | float) and not isinstance(own, bool))
            yield from ((key, own) for own in numbers)


def _is_written(number: int | float) -> bool:
    """Whether the value that is written is this number."""
    if isinstance(number, int):
        return abs(number) < _WHOLE and int(float(number)) == number
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    read, power = float(int("".join(map(str, digits)))), float(f"1e{min(abs(exponent), 308)}")
    if abs(exponent) > 308:
        return number == 0
    read = read * power if exponent > 0 else read / power
    return (-read if sign else read) == number


def _is_bound(number: int | float, is_low: bool) -> bool:
    """Whether no number beyond this bound is written; those below and above all whole numbers of 64 bits bound none."""
    if isinstance(number, float) and not number.is_integer():
        return True  # off by a rounding at most, as the bound itself is
    whole = int(number)
    if abs(whole) >= _WHOLE - 1:
        return (whole < 0) == is_low and abs(whole) <= sys.float_info.max
    return int(float(whole)) == whole


# Between the parts of a JSON text: a space, or a new line and its indentation. With "any white space", the library's
# default, a model may write blank lines until its tokens run out. A schema may bring its own: {"x-guidance":
# {"whitespace_flexible": true}}.
WHITESPACE = r" |\r?\n[ \t]{0,40}"

# llguidance knows a property by one way of writing its name, and takes "\u0061" for another property than "a". Without
# \u there is one way only. Control characters cannot be written then, but for those with an escape of their own.
_ESCAPES = 'nrbtf\\"'

_NEEDS_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

# Words that llguidance does not follow, with the values that ask for nothing.
_IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}

_DAY = (
    r"[0-9]{4}-(?:0[13-9]|1[0-2])|[0-9]{4}-02-(?:[01]|2[0-8])|"
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)

# llguidance has 29 February in every year and a 60th second in every minute, which no reader of dates takes.
_STRICTER = {
    "date": f"^(?:{_DAY})",
    "time": r"^[0-9]{2}:[0-9]{2}:[0-5]",
    "date-time": rf"^(?:{_DAY})[^:]*:[0-9]{{2}}:[0-5]",
}


def prepared_schema(field: str, value: Mapping[str, Any] | str, whitespace: str) -> dict[str, Any]:
    """The schema for llguidance, with `whitespace` (a regular expression) between its parts unless it has its own rule.

    Raises:
        InputError: no JSON, no JSON schema, or one that an answer could not be held to; names `field`.
    """
    schema = plain_schema(value)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InputError(field, value, "a JSON schema must be an object, or true for any JSON")
    check_text(field, json.dumps(schema, ensure_ascii=False))
    check_numbers(field, schema)
    options = schema.get("x-guidance", {})
    is_open = False
    for one in parts(schema):
        _leave_out_idle(one)
        _tighten_format(one)
        _check_min_properties(field, one)
        _check_open_bounds(field, one)
        _check_patterns(field, one)
        is_open = is_open or _names_some(one)
    if not isinstance(options, dict):
        return schema
    added = {} if "whitespace_flexible" in options else {"whitespace_pattern": whitespace}
    if is_open and not {"json_allowed_escapes", "json_allow_general_unicode_escapes"} & options.keys():
        _check_escapes(field, schema)
        added["json_allowed_escapes"] = _ESCAPES
    if added or options:
        schema["x-guidance"] = added | options
    return schema


def _leave_out_idle(one: dict[str, Any]) -> None:
    if "prefixItems" in one and not isinstance(one.get("items"), list):
        one.pop("additionalItems", None)  # says nothing beside it; llguidance would leave out `prefixItems` instead
    for word, idle in _IDLE.items():
        value = one.get(word)
        if any(type(value) is type(nothing) and value == nothing for nothing in idle):
            del one[word]


def _tighten_format(one: dict[str, Any]) -> None:
    given, both = one.get("format"), one.get("allOf", [])
    if isinstance(given, str) and given in _STRICTER and isinstance(both, list):
        one["allOf"] = [*both, {"pattern": _STRICTER[given]}]


def _check_min_properties(field: str, one: dict[str, Any]) -> None:
    """Refuse a least number of properties that one property written twice would reach."""
    least, required = one.get("minProperties"), one.get("required", [])
    if one.get("additionalProperties") is False and not one.get("patternProperties"):
        return  # all of them are named, and written once
    if isinstance(least, int) and isinstance(required, list) and least - len(required) > 1:
        remedy = "an answer could repeat a property to reach it; give at most one more than `required` names"
        raise InputError(field, f"minProperties: {least}", remedy)


def _check_open_bounds(field: str, one: dict[str, Any]) -> None:
    """Refuse a whole number as an open bound less than 1 from the other bound: it would be written itself."""
    ends = ("exclusiveMinimum", "minimum", "maximum"), ("exclusiveMaximum", "maximum", "minimum")
    for excluded, own, other in ends:
        bound = one.get(own) if one.get(excluded) is True else one.get(excluded)
        if not _is_number(bound) or bound % 1 != 0 or one.get("type") == "integer":
            continue
        beyond = (one.get(other), one.get("exclusive" + other.capitalize()))
        gaps = [abs(end - bound) for end in beyond if _is_number(end)]
        if gaps and 0 < min(gaps) < 1:
            remedy = f"so near the other bound, {bound} itself would be written; give a `{own}` that is no whole number"
            raise InputError(field, f"{excluded}: {bound}", remedy)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_patterns(field: str, one: dict[str, Any]) -> None:
    """Refuse patterns that the grammar engine reads otherwise than JSON schemas mean them."""
    named = one.get("patternProperties")
    for pattern in (one.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str) and (found := _odd_class(pattern)):
            raise InputError(field, f"pattern: {pattern}", f"`{found}` inside [...] is ambiguous; escape it with \\")


def _odd_class(pattern: str) -> str:
    """What stands inside a class of characters and is an operation on classes for llguidance; "" if nothing does."""
    inside, place = False, 0
    while place < len(pattern):
        sign = pattern[place]
        if sign == "\\":
            place += 1
        elif not inside:
            inside = sign == "["
            place += inside and pattern.startswith("^", place + 1)
        elif sign == "]":
            inside = False
        elif sign == "[" or pattern.startswith(("&&", "--", "~~"), place):
            return sign if sign == "[" else sign * 2
        place += 1
    return ""


def _names_some(one: dict[str, Any]) -> bool:
    """Whether the schema treats some properties of an object apart from others that it allows."""
    words = ("properties", "patternProperties", "required")
    return one.get("additionalProperties") is not False and any(one.get(word) for word in words)


def _check_escapes(field: str, schema: dict[str, Any]) -> None:
    """Refuse a value that cannot be written without escapes of the form \\u0001."""
    for one in parts(schema):
        for value in leaves([one[word] for word in VALUES if word in one]):
            if isinstance(value, str) and _NEEDS_ESCAPE.search(value):
                remedy = "this control character is written only where all objects have additionalProperties: false"
                raise InputError(field, value, remedy)
