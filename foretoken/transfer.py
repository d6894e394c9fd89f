"""The two ways between host and device. Only `to_host` waits for the device: its calls are the waits of a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor


def to_host(*parts: Tensor) -> list[Any]:
    """Vectors, or matrices of one width, as lists on the host, in one transfer that waits for the device.

    Numbers of different dtypes travel as float64, which holds every token id and every float32 exactly; integers and
    bools come back as such. What this thread reads `Later` comes along.
    """
    waiting = [one for one in _waiting.all if one.parts[0].device == parts[0].device and one.parts[0] is not parts[0]]
    if parts[0].dim() > 1:  # vectors do not travel with matrices
        waiting.clear()
    found = _bring([*parts, *(part for one in waiting for part in one.parts)])
    first = len(parts)
    for one in waiting:
        one.take(found[first : first + len(one.parts)])
        first += len(one.parts)
    return found[: len(parts)]


class Later:
    """Vectors of one device that nobody needs on the host before something else does: they come with this thread's next
    `to_host` from that device, or when they are asked for.
    """

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts
        self._found: list[Any] | None = None
        if parts[0].device.type != "cpu":
            _waiting.all.add(self)

    def take(self, found: list[Any]) -> None:
        """Keep the host copies that came along."""
        self._found = found
        _waiting.all.discard(self)

    @property
    def numbers(self) -> list[Any]:
        """The vectors as lists."""
        found = to_host(*self.parts) if self._found is None else self._found
        self.take(found)
        return found


class _Waiting(threading.local):
    """What a thread reads later; dropped with whoever would have read it."""

    def __init__(self) -> None:
        self.all: WeakSet[Later] = WeakSet()


_waiting = _Waiting()


def _bring(parts: Sequence[Tensor]) -> list[Any]:
    """The one copy that waits."""
    if all(part.device.type == "cpu" for part in parts):
        return [part.tolist() for part in parts]
    dtype = parts[0].dtype if len({part.dtype for part in parts}) == 1 else torch.float64
    flat = parts[0] if len(parts) == 1 else torch.cat([part.to(dtype) for part in parts])
    pieces = flat.cpu().split_with_sizes([part.shape[0] for part in parts])
    return [piece.to(part.dtype).tolist() for piece, part in zip(pieces, parts, strict=True)]


def to_device(
    values: Sequence[Any] | Tensor, device: torch.device | str, dtype: torch.dtype | None = torch.int64
) -> Tensor:
    """Numbers of the host as a tensor on `device`, without waiting for what the device still has to do.

    A copy from ordinary memory waits for all earlier work of the stream, even a copy of four bytes; one from pinned
    memory does not. `dtype` None keeps that of a tensor. The values must not be written to afterwards.
    """
    if isinstance(values, Tensor):
        host = values.to(dtype or values.dtype)
    elif dtype == torch.int64:
        host = torch.from_numpy(np.array(values, dtype=np.int64))  # torch reads lists of numbers four times as slowly
    else:
        host = torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return host.to(device)
    return _pinned(host).to(device, non_blocking=True)


def fill(target: Tensor, host: Tensor) -> None:
    """Copy numbers of the host into `target` as `to_device` does, without making a tensor on its device."""
    target.copy_(host if target.device.type == "cpu" else _pinned(host), non_blocking=True)


def _pinned(host: Tensor) -> Tensor:
    """`host` in pinned memory; the memory is not used again before copies from it are over."""
    return host.pin_memory() if host.device.type == "cpu" else host
