"""Requests that were in flight at two deaths of a worker: each may be what kills it, and is refused for a while."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from foretoken.backend.call import Call
from foretoken.errors import InputError

_DEATHS = 2  # one may be chance: everything in flight dies with the worker


class Quarantine:
    """Counts deaths by the fingerprint of what was in flight; forgets them after `quarantine_s`, 0 turns it off."""

    def __init__(self, quarantine_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarantine_s, self._clock = quarantine_s, clock
        self._deaths: dict[bytes, list[float]] = {}

    def __len__(self) -> int:
        self._forget()
        return sum(len(times) >= _DEATHS for times in self._deaths.values())

    def died(self, fingerprints: Iterable[bytes]) -> None:
        """A worker died while requests of these fingerprints were in flight."""
        if self._quarantine_s:
            self._forget()
            now = self._clock()
            for one in set(fingerprints):
                self._deaths.setdefault(one, []).append(now)

    def check(self, fingerprint: bytes) -> None:
        """Let a request pass.

        Raises:
            InputError: it was in flight at two deaths.
        """
        self._forget()
        times = self._deaths.get(fingerprint, ())
        if len(times) >= _DEATHS:
            raise InputError(
                "request",
                len(times),
                f"the engine died {len(times)} times while it answered this request, which is refused for "
                f"{self._quarantine_s:g} s; change the request, or come again later",
            )

    def _forget(self) -> None:
        oldest = self._clock() - self._quarantine_s
        self._deaths = {one: times for one, times in self._deaths.items() if times[-1] > oldest}


def fingerprint_of(call: Call) -> bytes:
    """The same for the same request, whatever its seed and tenant."""
    params = replace(call.params, seed=None, tenant="")
    asked = repr(msgspec.structs.replace(call, params=params, trace=False))
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).digest()
