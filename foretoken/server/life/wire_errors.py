"""Errors that cross from a worker to the front: class, field, remedy and numbers, never the texts of a user."""

from __future__ import annotations

import re

import msgspec

from foretoken import errors
from foretoken.errors import EngineError, ForetokenError, InputError

Number = int | float

# Measures such as "4097 tokens" hold nothing of a request's text.
_MEASURE = re.compile(r"[\d.,]{1,24}( (tokens|bytes|characters|seconds))?")
_OWN = ("field", "value", "remedy")  # attributes of an `InputError` that have a place of their own


class WireError(msgspec.Struct, frozen=True):
    """An error of `foretoken.errors` by its class name.

    `value` is the refused value where it is a number or a measure. `numbers` are further attributes, such as the limits
    of a `ContextLengthError`.
    """

    name: str
    message: str = ""
    field: str | None = None
    remedy: str = ""
    value: Number | str | None = None
    numbers: dict[str, Number] = {}


def to_wire(error: BaseException) -> WireError:
    """The error of a call. What is no error of ours is an `EngineError` that names the class only: its message may hold
    a user's text.
    """
    if isinstance(error, InputError):
        return WireError(
            type(error).__name__,
            field=error.field,
            remedy=error.remedy,
            value=error.value if _is_open(error.value) else None,  # type: ignore[arg-type]
            numbers=_numbers(error),
        )
    if isinstance(error, EngineError) or not isinstance(error, ForetokenError):
        cause = error.__cause__ if isinstance(error, EngineError) else error
        name = "" if cause is None else f": {type(cause).__name__}"
        return WireError(EngineError.__name__, f"the request failed inside the engine{name}", numbers=_numbers(error))
    return WireError(type(error).__name__, str(error), numbers=_numbers(error))


def to_wire_of_loading(error: BaseException) -> WireError:
    """The error of a start, for the operator: with its value and its message."""
    if isinstance(error, InputError):
        value = error.value if isinstance(error.value, int | float) else str(error.value)
        return WireError(type(error).__name__, field=error.field, remedy=error.remedy, value=value)
    if isinstance(error, ForetokenError):
        return WireError(type(error).__name__, str(error))
    return WireError(EngineError.__name__, f"the engine could not be started: {type(error).__name__}: {error}")


def from_wire(error: WireError) -> ForetokenError:
    """The same error on this side."""
    kind = getattr(errors, error.name, EngineError)
    if not (isinstance(kind, type) and issubclass(kind, ForetokenError)):
        kind = EngineError
    found: ForetokenError
    if issubclass(kind, InputError):
        found = kind(error.field or "request", error.value, error.remedy)
    else:
        found = kind(error.message)
    for name, number in error.numbers.items():
        setattr(found, name, number)
    return found


def _is_open(value: object) -> bool:
    """Whether a refused value may be shown."""
    if isinstance(value, int):
        return value.bit_length() < 64
    return isinstance(value, float) or (isinstance(value, str) and _MEASURE.fullmatch(value) is not None)


def _numbers(error: BaseException) -> dict[str, Number]:
    return {
        name: value
        for name, value in vars(error).items()
        if name not in _OWN and isinstance(value, int | float) and _is_open(value)
    }
