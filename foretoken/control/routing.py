"""Plain rules that come before the controller's arithmetic: which requests are not speculated for at all.

They hold for what a request leaves open; a number of guesses that the caller set always stands.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, get_args

from foretoken.params import check_number, check_whole

Reason = Literal["short answer", "load", "slice lost"]
REASONS: tuple[Reason, ...] = get_args(Reason)
_KEEP = 0.99  # weight of the past in a slice's account, per round with guesses
_MOST_SLICES = 256


@dataclass(frozen=True)
class RoutingRules:
    """When not to speculate.

    - `min_tokens_to_speculate`: requests for fewer new tokens decode plainly: a draft model would read the prompt for
      little.
    - `max_speculating_requests`: while more requests than this decode together, nobody guesses.
    - `max_slice_loss`: a slice (`SamplingParams.slice`) whose guesses took more time than they saved, by more than this
      share of the time of its rounds, and over `slice_rounds` rounds at least, is left alone; every `slice_retry`-th of
      its requests is let through.
    """

    min_tokens_to_speculate: int = 0
    max_speculating_requests: int | None = None
    max_slice_loss: float = 0.03
    slice_rounds: int = 200
    slice_retry: int = 16

    def __post_init__(self) -> None:
        check_whole("min_tokens_to_speculate", self.min_tokens_to_speculate, low=0)
        if self.max_speculating_requests is not None:
            check_whole("max_speculating_requests", self.max_speculating_requests, low=0)
        check_number("max_slice_loss", self.max_slice_loss, low=0.0, high=1.0)
        check_whole("slice_rounds", self.slice_rounds, low=1)
        check_whole("slice_retry", self.slice_retry, low=2)


@dataclass
class _Account:
    """What guesses took and saved in one slice, in seconds, over rounds in which there were some."""

    num_rounds: int = 0
    took_s: float = 0.0
    saved_s: float = 0.0
    whole_s: float = 0.0
    num_turned_away: int = 0


class Routing:
    """Applies the rules; `num_by_reason` counts the requests that were not speculated for, each once per reason."""

    def __init__(self, rules: RoutingRules) -> None:
        self.rules = rules
        self.num_by_reason: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # by slice, used last at the end
        self._verdicts: dict[int, Reason | None] = {}  # of requests, on what does not change while they run
        self._crowded: set[int] = set()

    def reason(self, request_id: int, max_tokens: int, label: str, num_running: int) -> Reason | None:
        """Why a request that may run for `max_tokens` is not speculated for among `num_running` that decode; None if it
        is.
        """
        if request_id not in self._verdicts:
            self._verdicts[request_id] = self._judge(max_tokens, label)
        verdict = self._verdicts[request_id]
        if verdict is not None:
            return verdict
        if self.rules.max_speculating_requests is None or num_running <= self.rules.max_speculating_requests:
            return None
        if request_id not in self._crowded:
            self._crowded.add(request_id)
            self.num_by_reason["load"] += 1
        return "load"

    def observe(self, label: str, took_s: float, saved_s: float, plain_s: float) -> None:
        """Take in a round of one request with guesses: what they took, what the tokens they brought would have taken,
        what it takes without.
        """
        if not label:
            return
        account = self._accounts.setdefault(label, _Account())
        self._accounts.move_to_end(label)
        if len(self._accounts) > _MOST_SLICES:
            self._accounts.popitem(last=False)
        account.num_rounds += 1
        account.took_s = _KEEP * account.took_s + took_s
        account.saved_s = _KEEP * account.saved_s + saved_s
        account.whole_s = _KEEP * account.whole_s + took_s + plain_s

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._verdicts.pop(request_id, None)
        self._crowded.discard(request_id)

    def _judge(self, max_tokens: int, label: str) -> Reason | None:
        verdict: Reason | None = None
        if max_tokens < self.rules.min_tokens_to_speculate:
            verdict = "short answer"
        elif self._has_lost(label):
            account = self._accounts[label]
            account.num_turned_away += 1
            verdict = None if account.num_turned_away % self.rules.slice_retry == 0 else "slice lost"
        if verdict is not None:
            self.num_by_reason[verdict] += 1
        return verdict

    def _has_lost(self, label: str) -> bool:
        account = self._accounts.get(label)
        if account is None or account.num_rounds < self.rules.slice_rounds:
            return False
        return account.took_s - account.saved_s > self.rules.max_slice_loss * account.whole_s
