"""Numbers of a JSON schema that llguidance would follow as other numbers.

It computes with 64-bit floats, and reads decimal digits into them with up to two roundings. An identifier of 18 digits
in an `enum` would be written as another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from foretoken.errors import InputError

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
