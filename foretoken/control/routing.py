"""Plain rules that come before the policy's arithmetic: which requests are not speculated for at all.

They hold for what a request leaves open; a number of draft tokens that the caller set always stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from foretoken.config import DRAFTING
from foretoken.option import Settings
from foretoken.params import check_whole

Reason = Literal["short answer", "load", "draft model"]
REASONS: tuple[Reason, ...] = get_args(Reason)
_setting = Settings(DRAFTING)


@dataclass(frozen=True)
class RoutingRules:
    """When not to speculate.

    - `min_tokens_to_speculate`: requests for fewer new tokens decode plainly.
    - `min_tokens_for_draft_model`: for requests of fewer new tokens, with a prompt at least as long, that may use
      several drafters, those that read the prompt with a model of their own are left out. The policy weighs what
      reading takes against `max_tokens`; answers mostly end earlier, and their second token waits for it.
    - `max_speculating_requests`: while more requests than this decode together, nothing is drafted.
    """

    min_tokens_to_speculate: int = _setting(
        0, "With --num-draft auto: answers shorter than this are decoded without drafts."
    )
    min_tokens_for_draft_model: int = _setting(
        50, "With --num-draft auto and several drafters: answers shorter than this get no draft model."
    )
    max_speculating_requests: int | None = _setting(
        None, "With --num-draft auto: no drafts while more answers than this run; without it, no limit."
    )

    def __post_init__(self) -> None:
        check_whole("min_tokens_to_speculate", self.min_tokens_to_speculate, low=0)
        check_whole("min_tokens_for_draft_model", self.min_tokens_for_draft_model, low=0)
        if self.max_speculating_requests is not None:
            check_whole("max_speculating_requests", self.max_speculating_requests, low=0)


def is_short(num_prompt_tokens: int, max_new_tokens: int, rules: RoutingRules) -> bool:
    """Whether a request is too short for a drafter that reads its prompt with a model."""
    return max_new_tokens < rules.min_tokens_for_draft_model and num_prompt_tokens >= max_new_tokens


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
        if found is not None:
            self._count(request_id, found)
        return found

    def leaves_out(self, request_id: int, reads_prompt: Sequence[bool]) -> frozenset[int]:
        """Places of a short request's drafter options that are left out, where another one can draft; `reads_prompt`
        says of each option whether it reads the prompt with a model of its own.
        """
        if all(reads_prompt):
            return frozenset()
        found = frozenset(place for place, reads in enumerate(reads_prompt) if reads)
        if found:
            self._count(request_id, REASONS[2])
        return found

    def _count(self, request_id: int, reason: Reason) -> None:
        counted = self._counted.setdefault(request_id, set())
        if reason not in counted:
            counted.add(reason)
            self.num_by_reason[reason] += 1

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._counted.pop(request_id, None)
