"""Which worker answers a call: the least loaded one, or the one that has read the same beginning before; none, for a
while, if it was in flight at two deaths of a worker: it may be what kills them.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import msgspec

from foretoken.backend.call import Call
from foretoken.errors import InputError

# Beginnings that differ in these are different ones: a system prompt and the first question, as a rule.
_PREFIX_CHARACTERS = 512
_PREFIX_TOKENS = 128
_MAX_PREFIXES = 16_384  # about 2 MB
_SLACK = 4  # a worker with the prefix may have so many more calls in flight than the least loaded one
_DEATHS = 2  # one may be chance: everything in flight dies with the worker


class PrefixRouting:
    """Remembers by tenant and beginning of the prompt which worker read it last."""

    def __init__(self) -> None:
        self._worker_of: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, call: Call, loads: Mapping[int, int]) -> int:
        """The worker for a call, of those in `loads` (calls in flight by worker; at least one)."""
        least = min(loads, key=lambda number: (loads[number], number))
        if len(loads) == 1:
            return least
        prefix = prefix_of(call)
        known = self._worker_of.pop(prefix, None)
        is_free = known is not None and known in loads and loads[known] <= loads[least] + _SLACK
        chosen = known if known is not None and is_free else least
        self._worker_of[prefix] = chosen
        while len(self._worker_of) > _MAX_PREFIXES:
            self._worker_of.popitem(last=False)
        return chosen


def prefix_of(call: Call) -> bytes:
    """The tenant and the beginning of the (first) prompt as a hash."""
    prompt: object
    if call.messages is not None:
        prompt = repr(call.messages)[:_PREFIX_CHARACTERS]
    else:
        first = call.prompts[0] if call.prompts else ""
        prompt = first[:_PREFIX_CHARACTERS] if isinstance(first, str) else list(first[:_PREFIX_TOKENS])
    text = repr((call.params.tenant, prompt))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


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
