"""The exception tree.

ForetokenError                      exit code
|- InputError (ValueError)          2   a user's value: the message names field, value and remedy
|  |- ConfigError                   2   an unknown or contradictory option
|  |- ContextLengthError            2   prompt and output do not fit the context
|- ModelError (ValueError)          3   a checkpoint that cannot be used
|  |- CheckpointError               3   missing, truncated, corrupt
|  |- UnsupportedModelError         3   an architecture that cannot generate text here
|  |- MismatchError                 3   target and draft (or tokenizer) do not belong together
|- CapacityError (RuntimeError)     1   out of KV blocks
|  |- OverloadedError               1   the queue is full: retry later
|- EngineError (RuntimeError)       1   an exception inside the engine: the request fails, the engine continues
|  |- WorkerDiedError               1   the engine's process died while the request ran
|     |- RankError                  1   a rank of a tensor-parallel target died or hangs: the engine ends
|- UnavailableError (RuntimeError)  1   the engine takes no requests now: it is loading, draining or being restarted
|- DraftError (RuntimeError)        1   a drafter broke its contract: its draft is dropped, the request continues
|  |- DraftTimeout                  1   it exceeded its time limit
|- NumericsError (RuntimeError)     1   NaN or infinite logits: the request fails, the engine continues
|- StorageError (OSError)           4   a file or folder that cannot be written or read
|- GateError                        5   a measured value misses the requested threshold
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

_log = logging.getLogger("foretoken")


class ForetokenError(Exception):
    """Base class of every error that foretoken raises on purpose."""

    exit_code = 1


class InputError(ForetokenError, ValueError):
    """A value given by the user cannot be honoured.

    The message names the field, shows the value and says what to do instead.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={_shorten(value)}: {remedy}")

    def __reduce__(self) -> tuple[type[InputError], tuple[str, object, str], dict[str, object]]:
        # Python would make a copy from the message alone: a pool of processes breaks down at such an exception.
        state = vars(self)
        if not _is_plain(self.value):  # another process may not be able to have it
            state = {**state, "value": _Shown(_shorten(self.value))}
        return type(self), (self.field, state["value"], self.remedy), state


class ConfigError(InputError):
    """An option that does not exist, or that contradicts another one."""


class ContextLengthError(InputError):
    """Prompt and requested output do not fit into the model's context."""


class ModelError(ForetokenError, ValueError):
    """A checkpoint, or a pair of checkpoints, that cannot be used."""

    exit_code = 3


class CheckpointError(ModelError):
    """A checkpoint that is missing, truncated, corrupt or incomplete."""


class UnsupportedModelError(ModelError):
    """An architecture that cannot be run as a causal language model."""


class MismatchError(ModelError):
    """Target and draft (or model and tokenizer) do not belong together."""


class CapacityError(ForetokenError, RuntimeError):
    """Not enough KV blocks."""


class OverloadedError(CapacityError):
    """The queue is full; the same request may succeed later."""


class EngineError(ForetokenError, RuntimeError):
    """An exception (`__cause__`) inside the engine after which the request cannot continue. Other requests continue."""


class WorkerDiedError(EngineError):
    """The engine's process died while a request was in flight: any of its requests may be the cause."""


class RankError(WorkerDiedError):
    """A process of a tensor-parallel target died or does not answer: all requests fail, and the engine ends."""


class UnavailableError(ForetokenError, RuntimeError):
    """The engine takes no requests now: it is loading, draining or being restarted. They may succeed later."""


class DraftError(ForetokenError, RuntimeError):
    """A drafter returned an invalid draft, or did not finish; it never reaches the caller of `generate`."""


class DraftTimeout(DraftError):
    """A drafter exceeded its time limit; raised inside the drafter."""


class DrafterWarning(UserWarning):
    """A drafter failed, or was disabled for a request, which continues without it."""


class SpeculationWarning(UserWarning):
    """Speculation costs more than it need, or cannot be used; the message ends with a remedy."""


class NumericsError(ForetokenError, RuntimeError):
    """The model produced NaN or infinite logits for a request."""


class StorageError(ForetokenError, OSError):
    """A file or folder that cannot be read or written; `report` is a measurement that it was to hold."""

    exit_code = 4
    report: Any = None


class GateError(ForetokenError):
    """A measured value misses the requested threshold."""

    exit_code = 5


def warn(warning: str | Warning, stacklevel: int = 1) -> None:
    """`warnings.warn`; where the caller's filters make an error of it, it is logged: a warning stops no answer."""
    try:
        warnings.warn(warning, stacklevel=stacklevel + 1)
    except Warning as raised:
        _log.warning("%s: %s", type(raised).__name__, raised)


def _is_plain(value: object) -> bool:
    """Whether a value is made of nothing but texts, numbers, paths and containers of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | Path)


class _Shown(str):
    """What a value looked like that could not be copied."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shorten(value: object, limit: int = 80) -> str:
    """`repr` cut to `limit` characters, so that a long prompt cannot fill the terminal; both ends stay, such as those
    of a path and its line.
    """
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]  # the rest would be cut anyway, and may be gigabytes
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python spells no integer of 5,000 digits, and no list nested 1,000 deep
        text = f"<{type(value).__name__}>"
    if len(text) <= limit:
        return text
    head = limit // 2
    return text[:head] + "..." + text[head + 3 - limit :]


def install(extra: str) -> str:
    """How the packages of an extra are installed, for errors; foretoken is on no package index."""
    return f"pip install '.[{extra}]' in a checkout, or pip install 'foretoken[{extra}]' where a wheel is installed"
