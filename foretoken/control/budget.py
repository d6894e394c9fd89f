"""Who guesses for each request of a step, and how much: the most expected tokens per second over the whole batch.

A request has an option for each drafter it may use. It takes the one that would pay best if it alone were to choose;
guesses are then admitted one by one over all requests, the likeliest to be emitted per row first, and the best count
wins. Zero is always among the counts.

Best is what brings the most tokens per second in the long run. Where every step is like this one that is the most
expected tokens per expected second (goodput of TurboSpec, 2406.14066; the ratio rule). Where steps differ, because a
lookup finds something in one and nothing in the next, a guess in a poor step must earn what a second earns on average,
`rate` tokens: then tokens - rate * seconds is maximised (renewal reward; Dinkelbach's method for ratios). All that
enters was known before the round, so the choice depends on nothing that is drawn in it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

_CHEAP = 0.01  # a drafter that takes less of a step than this need not be weighed as a whole
_STAY = 1.03  # by how much another option must be better than the one in use: no fluttering between equals

StepSeconds = Callable[[float], float]  # of the target, by rows
DraftSeconds = Callable[[Hashable, int], float]  # of a drafter, by its longest draft


@dataclass(frozen=True)
class Candidate:
    """What one request can gain by one drafter: for each place of its draft the shares of rounds in which it is guessed
    and emitted.

    `at_least` guesses are not up for choice (a caller's own number). `entry_s` is what the drafter takes on top because
    the request is new to it, spread over the rounds it may serve. `in_use`: it guessed last time. `weight` is what a
    token of this request counts. `drafter` None: the request does not draft.
    """

    drafter: Hashable | None
    drafted: tuple[float, ...] = ()
    emitted: tuple[float, ...] = ()
    at_least: int = 0
    entry_s: float = 0.0
    in_use: bool = False
    weight: float = 1.0


NO_CANDIDATE = Candidate(None)


@dataclass(frozen=True)
class Allocation:
    """The option of every request (its place among the request's own, None: no guesses) and its guesses, and what is
    expected of the step.
    """

    picks: tuple[int | None, ...]
    budgets: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def choose_budgets(
    requests: Sequence[Sequence[Candidate]],
    num_other_rows: int,
    step_s: StepSeconds,
    draft_s: DraftSeconds,
    rate: float = 0.0,
) -> Allocation:
    """The best choice: `step_s(rows)` is what the target takes, `draft_s(drafter, num_draft)` what a drafter takes for
    its longest draft.

    `num_other_rows` stand in the step whatever is chosen. A drafter that does not earn what it takes is left out as a
    whole. `rate` is what a second earns on average in tokens, 0 where that is not known.
    """
    users: dict[Hashable, int] = {}
    for options in requests:
        for option in options:
            if option.drafter is not None and (option.emitted or option.at_least):
                users[option.drafter] = users.get(option.drafter, 0) + 1
    step = _Step(num_other_rows, len(requests), step_s, draft_s, users, rate)
    active = set(users)
    best = step.best(requests, active)
    dear = [
        drafter for drafter in users if draft_s(drafter, 1) > _CHEAP * best.seconds
    ]  # in order: of equals the first goes, whatever their hashes
    while (
        dear
    ):  # guesses are admitted without a look at what their drafter takes: leave out, one by one, who gains least by it
        fewer = {drafter: step.best(requests, active - {drafter}) for drafter in dear}
        least = max(fewer, key=lambda drafter: step.worth(fewer[drafter].tokens, fewer[drafter].seconds))
        best = max(best, fewer[least], key=lambda choice: step.worth(choice.tokens, choice.seconds))
        active.remove(least)
        dear.remove(least)
    return best


class _Step:
    """The choice for a given set of drafters that may be given more than they must."""

    def __init__(
        self,
        num_other_rows: int,
        num_requests: int,
        step_s: StepSeconds,
        draft_s: DraftSeconds,
        users: dict[Hashable, int],
        rate: float,
    ) -> None:
        self.rows, self.rate = num_other_rows + num_requests, rate
        self.step_s, self.draft_s, self.users = step_s, draft_s, users

    def worth(self, tokens: float, seconds: float) -> float:
        """What is maximised."""
        return tokens - self.rate * seconds if self.rate else tokens / max(seconds, 1e-12)

    def best(self, requests: Sequence[Sequence[Candidate]], active: set[Hashable]) -> Allocation:
        picks = [self._pick(options, active, len(requests)) for options in requests]
        chosen = [
            options[pick] if pick is not None else NO_CANDIDATE for options, pick in zip(requests, picks, strict=True)
        ]
        budgets, tokens, seconds = self._admit(chosen, active)
        return Allocation(
            tuple(pick if budget else None for pick, budget in zip(picks, budgets, strict=True)),
            tuple(budgets),
            tokens,
            seconds,
        )

    def _pick(self, options: Sequence[Candidate], active: set[Hashable], num_requests: int) -> int | None:
        """The option of one request that would pay best if the others made no guesses; a number that was set must be
        met by one of them.
        """
        if len(options) == 1:
            return 0 if options[0].drafter in active or options[0].at_least else None
        best = (
            self.worth(num_requests, self.step_s(self.rows))
            if not any(option.at_least for option in options)
            else -math.inf
        )
        pick: int | None = None
        for place, option in enumerate(options):
            if option.drafter in active or option.at_least:
                value = self._alone(option, num_requests)
                value += (_STAY - 1) * abs(value) if option.in_use else 0.0
                if value > best:
                    best, pick = value, place
        return pick

    def _alone(self, option: Candidate, num_requests: int) -> float:
        """What a step is worth at best in which only this option guesses, its drafter's time shared with who else may
        use it.
        """
        share = 1 / self.users[option.drafter]
        rows, tokens, best = float(self.rows), float(num_requests), -math.inf
        for place, (drafted, emitted) in enumerate(zip(option.drafted, option.emitted, strict=True)):
            rows, tokens = rows + drafted, tokens + option.weight * emitted
            if place + 1 >= option.at_least:
                seconds = self.step_s(rows) + share * self.draft_s(option.drafter, place + 1) + option.entry_s
                best = max(best, self.worth(tokens, seconds))
        return best

    def _admit(self, options: Sequence[Candidate], active: set[Hashable]) -> tuple[list[int], float, float]:
        """Best count of guesses."""
        budgets = [option.at_least for option in options]
        longest: dict[Hashable, int] = {}
        rows, tokens = float(self.rows), sum(option.weight for option in options)
        heap: list[tuple[float, int, int]] = []
        entries_s = 0.0
        for b, option in enumerate(options):
            for place in range(min(option.at_least, len(option.emitted))):
                rows, tokens = rows + option.drafted[place], tokens + option.weight * option.emitted[place]
            if option.drafter is not None and option.at_least:
                longest[option.drafter] = max(longest.get(option.drafter, 0), option.at_least)
                entries_s += option.entry_s
            if option.drafter in active:
                _offer(heap, options, b, option.at_least)
        draft_total = entries_s + sum(self.draft_s(drafter, count) for drafter, count in longest.items())
        best, best_tokens, best_s, admitted = 0, tokens, self.step_s(rows) + draft_total, list[int]()
        most = self.worth(best_tokens, best_s)
        while heap:
            _, b, place = heapq.heappop(heap)
            option = options[b]
            admitted.append(b)
            rows, tokens = rows + option.drafted[place], tokens + option.weight * option.emitted[place]
            if not place:
                draft_total += option.entry_s
            if place + 1 > longest.get(option.drafter, 0):
                before = self.draft_s(option.drafter, longest[option.drafter]) if option.drafter in longest else 0.0
                longest[option.drafter] = place + 1
                draft_total += self.draft_s(option.drafter, place + 1) - before
            _offer(heap, options, b, place + 1)
            seconds = self.step_s(rows) + draft_total
            worth = self.worth(tokens, seconds)
            if worth > most:
                best, best_tokens, best_s, most = len(admitted), tokens, seconds, worth
        for b in admitted[:best]:
            budgets[b] += 1
        return budgets, best_tokens, best_s


def _offer(heap: list[tuple[float, int, int]], options: Sequence[Candidate], b: int, place: int) -> None:
    option = options[b]
    if place < len(option.emitted) and option.emitted[place] > 0:
        worth = option.weight * option.emitted[place] / max(option.drafted[place], 1e-9)
        heapq.heappush(heap, (-worth, b, place))
