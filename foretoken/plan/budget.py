"""How many guesses each request of a step may make: the most expected tokens per second over the whole batch.

Guesses are admitted one by one, the likeliest to be emitted per row first, and the count with the best ratio of expected tokens to
expected seconds wins (goodput of TurboSpec, 2406.14066; the ratio rule). Zero is always among the counts. All that enters was known
before the round, so the choice depends on no token of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

_CHEAP = 0.01  # a drafter that takes less of a step than this need not be weighed as a whole


@dataclass(frozen=True)
class Option:
    """What one request can gain: for each place of its draft the shares of rounds in which it is guessed (`drafted`) and emitted (`emitted`).

    `at_least` guesses are not up for choice (a caller's own number). `drafter` None: the request does not draft.
    """

    drafter: Hashable | None
    drafted: tuple[float, ...] = ()
    emitted: tuple[float, ...] = ()
    at_least: int = 0


@dataclass(frozen=True)
class Choice:
    """Guesses per request, and what is expected of the step."""

    budgets: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose_budgets(
    options: Sequence[Option], num_other_rows: int, step_s: Callable[[float], float], draft_s: Callable[[Hashable, int], float]
) -> Choice:
    """The best budgets: `step_s(rows)` is what the target takes, `draft_s(drafter, num_draft)` what a drafter takes for its longest draft.

    `num_other_rows` stand in the step whatever is chosen. A drafter that does not earn what it takes is left out as a whole.
    """
    active = {option.drafter for option in options if option.drafter is not None and option.emitted}
    best = _admit(options, active, num_other_rows, step_s, draft_s)
    dear = {drafter for drafter in active if draft_s(drafter, 1) > _CHEAP * best.seconds}
    while dear:  # guesses are admitted without a look at what their drafter takes: leave out, one by one, who gains least by it
        fewer = {drafter: _admit(options, active - {drafter}, num_other_rows, step_s, draft_s) for drafter in dear}
        least = max(fewer, key=lambda drafter: fewer[drafter].tokens_per_s)
        best = max(best, fewer[least], key=lambda choice: choice.tokens_per_s)
        active, dear = active - {least}, dear - {least}
    return best


def _admit(
    options: Sequence[Option],
    active: set[Hashable | None],
    num_other_rows: int,
    step_s: Callable[[float], float],
    draft_s: Callable[[Hashable, int], float],
) -> Choice:
    """Best count of guesses when only the `active` drafters may be given more than they must."""
    budgets = [option.at_least for option in options]
    longest: dict[Hashable, int] = {}
    rows, tokens = float(num_other_rows + len(options)), float(len(options))
    heap: list[tuple[float, int, int]] = []
    for b, option in enumerate(options):
        for place in range(min(option.at_least, len(option.emitted))):
            rows, tokens = rows + option.drafted[place], tokens + option.emitted[place]
        if option.drafter is not None and option.at_least:
            longest[option.drafter] = max(longest.get(option.drafter, 0), option.at_least)
        if option.drafter in active:
            _offer(heap, options, b, option.at_least)
    draft_total = sum(draft_s(drafter, count) for drafter, count in longest.items())
    best = Choice(tuple(budgets), tokens, step_s(rows) + draft_total)
    while heap:
        _, b, place = heapq.heappop(heap)
        option = options[b]
        assert option.drafter is not None
        budgets[b] = place + 1
        rows, tokens = rows + option.drafted[place], tokens + option.emitted[place]
        if budgets[b] > longest.get(option.drafter, 0):
            before = draft_s(option.drafter, longest[option.drafter]) if option.drafter in longest else 0.0
            longest[option.drafter] = budgets[b]
            draft_total += draft_s(option.drafter, budgets[b]) - before
        _offer(heap, options, b, place + 1)
        seconds = step_s(rows) + draft_total
        if tokens * best.seconds > best.tokens * seconds:
            best = Choice(tuple(budgets), tokens, seconds)
    return best


def _offer(heap: list[tuple[float, int, int]], options: Sequence[Option], b: int, place: int) -> None:
    option = options[b]
    if place < len(option.emitted) and option.emitted[place] > 0:
        worth = option.emitted[place] / max(option.drafted[place], 1e-9)
        heapq.heappush(heap, (-worth, b, place))
