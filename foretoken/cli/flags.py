"""Groups of flags that several verbs have, made once and read from the verb's context."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

Verb = Callable[..., None]


def flag(name: str, default: object, annotation: object) -> inspect.Parameter:
    """A flag as a parameter of a verb."""
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)


def with_flags(verb: Verb, flags: Sequence[inspect.Parameter], after: str) -> Verb:
    """`verb` with `flags` behind its own parameter `after`; it does not get them as arguments."""
    hints = typing.get_type_hints(verb, include_extras=True)
    before = [p.replace(annotation=hints[p.name]) for p in inspect.signature(verb).parameters.values()]
    place = 1 + [p.name for p in before].index(after)
    added = {one.name for one in flags}

    def called(**given: Any) -> None:  # noqa: ANN401 - flags of all types
        verb(**{name: value for name, value in given.items() if name not in added})

    parameters = [*before[:place], *flags, *before[place:]]
    called.__name__, called.__doc__, called.__module__ = verb.__name__, verb.__doc__, verb.__module__
    called.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called
