"""Which worker answers a call: the least loaded one, or the one that has read the same beginning before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

from foretoken.backend.call import Call

# Beginnings that differ in these are different ones: a system prompt and the first question, as a rule.
_PREFIX_CHARACTERS = 512
_PREFIX_TOKENS = 128
_MAX_PREFIXES = 16_384  # about 2 MB
_SLACK = 4  # a worker with the prefix may have so many more calls in flight than the least loaded one


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
