"""Plain rules that come before the policy's arithmetic: which requests are not speculated for at all.

They hold for what a request leaves open; a number of guesses that the caller set always stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from foretoken.params import check_whole

Reason = Literal["short answer", "load"]
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True)
class RoutingRules:
    """When not to speculate.

    - `min_tokens_to_speculate`: requests for fewer new tokens decode plainly: a draft model would read the prompt for
      little.
    - `max_speculating_requests`: while more requests than this decode together, no guesses are made.
    """

    min_tokens_to_speculate: int = 0
    max_speculating_requests: int | None = None

    def __post_init__(self) -> None:
        check_whole("min_tokens_to_speculate", self.min_tokens_to_speculate, low=0)
        if self.max_speculating_requests is not None:
            check_whole("max_speculating_requests", self.max_speculating_requests, low=0)


class Routing:
    """Applies the rules; `num_by_reason` counts the requests that were not speculated for, each once per reason."""

    def __init__(self, rules: RoutingRules) -> None:
        self.rules = rules
        self.num_by_reason: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._counted: dict[int, set[Reason]] = {}

    def reason(self, request_id: int, max_new_tokens: int, num_running: int) -> Reason | None:
        """Why a request is not speculated for among `num_running` that decode; None if it is."""
        rules, found = self.rules, None
        if max_new_tokens < rules.min_tokens_to_speculate:
            found = REASONS[0]
        elif rules.max_speculating_requests is not None and num_running > rules.max_speculating_requests:
            found = REASONS[1]
        if found is not None and found not in self._counted.setdefault(request_id, set()):
            self._counted[request_id].add(found)
            self.num_by_reason[found] += 1
        return found

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._counted.pop(request_id, None)
