"""The joint allocation: which drafter drafts for each request of a step, and how much.

A request has a candidate for each drafter option. It takes the one that would pay best if it alone were to choose;
draft tokens are then admitted one by one over all requests, the likeliest to be emitted per row first, and the best
count wins. Zero is always among the counts.

Best is the most tokens per second in the long run. Where every step is like this one that is the most expected tokens
per expected second (goodput, TurboSpec, 2406.14066). Where steps differ, because a lookup finds something in one and
nothing in the next, draft tokens are valued at the long-run token rate, an opportunity cost: tokens - rate * seconds is
maximised (Dinkelbach's method for ratios of renewal rewards).

All that enters was known before the round, so the choice depends on nothing that is drawn in it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from foretoken.control.candidates import Candidate
from foretoken.control.config import DEFAULT, BudgetConfig

StepSeconds = Callable[[float], float]  # of the target, by rows
DraftSeconds = Callable[[Hashable, int], float]  # of a drafter, by its longest draft


@dataclass(frozen=True)
class Allocation:
    """The candidate of every request (its place, None: no draft tokens), its draft tokens, and what is expected."""

    picks: tuple[int | None, ...]
    budgets: tuple[int, ...]
    tokens: float
    seconds: float


def allocate(
    candidates: Sequence[Sequence[Candidate]],
    weights: Sequence[float],
    step_s: StepSeconds,
    draft_s: DraftSeconds,
    rate: float = 0.0,
    extra_s: float = 0.0,
    config: BudgetConfig = DEFAULT.budget,
) -> Allocation:
    """The best allocation over the `candidates` of each request, whose tokens count `weights`.

    `step_s(rows)` is what the target takes, `draft_s(drafter, num_draft)` what a drafter takes. A drafter that does not
    gain what it takes is left out as a whole. `rate` is the long-run token rate, 0 where that is not known. The host
    takes `extra_s` longer in a step with any draft token.
    """
    users: dict[Hashable, int] = {}
    for own in candidates:
        for candidate in own:
            if candidate.emitted or candidate.at_least:
                users[candidate.drafter] = users.get(candidate.drafter, 0) + 1
    step = _Step(candidates, weights, step_s, draft_s, users, rate, extra_s)
    active = set(users)
    best = step.best(active)
    # In order: of equals the first goes, whatever their hashes are.
    expensive = [drafter for drafter in users if draft_s(drafter, 1) > config.cheap_share * best.seconds]
    while expensive:  # draft tokens are admitted without their drafter's time: leave out, one by one, who gains least
        fewer = {drafter: step.best(active - {drafter}) for drafter in expensive}
        least = max(fewer, key=lambda drafter: step.value(fewer[drafter].tokens, fewer[drafter].seconds))
        best = max(best, fewer[least], key=lambda found: step.value(found.tokens, found.seconds))
        active.remove(least)
        expensive.remove(least)
    return best


class _Step:
    """The allocation for a given set of drafters that may be given more than they must."""

    def __init__(
        self,
        candidates: Sequence[Sequence[Candidate]],
        weights: Sequence[float],
        step_s: StepSeconds,
        draft_s: DraftSeconds,
        users: dict[Hashable, int],
        rate: float,
        extra_s: float,
    ) -> None:
        self.candidates, self.weights, self.rate, self.extra_s = candidates, weights, rate, extra_s
        self.step_s, self.draft_s, self.users = step_s, draft_s, users
        self.own_s = step_s(len(candidates))
        self._alone = self._values_alone()
        self._found: dict[tuple[tuple[int | None, ...], frozenset[Hashable]], Allocation] = {}

    def value(self, tokens: float, seconds: float) -> float:
        """What is maximised."""
        return tokens - self.rate * seconds if self.rate else tokens / max(seconds, 1e-12)

    def best(self, active: set[Hashable]) -> Allocation:
        """The best where only `active` drafters may be given more than they must."""
        picks = tuple(self._pick(b, active) for b in range(len(self.candidates)))
        chosen = [None if pick is None else own[pick] for own, pick in zip(self.candidates, picks, strict=True)]
        used = frozenset(one.drafter for one in chosen if one is not None and one.drafter in active)
        if (picks, used) not in self._found:  # leaving out a drafter that nobody takes changes nothing
            budgets, tokens, seconds = _Admission(self, chosen, used).run()
            made = tuple(pick if budget else None for pick, budget in zip(picks, budgets, strict=True))
            self._found[picks, used] = Allocation(made, tuple(budgets), tokens, seconds)
        return self._found[picks, used]

    def _pick(self, b: int, active: set[Hashable]) -> int | None:
        """The candidate that pays best if the others make no draft tokens; a number that was set must be met by one."""
        candidates = self.candidates[b]
        if len(candidates) < 2:
            return 0 if candidates and (candidates[0].drafter in active or candidates[0].at_least) else None
        fixed = any(candidate.at_least for candidate in candidates)
        best = -math.inf if fixed else self.value(len(self.candidates), self.own_s)
        pick: int | None = None
        for place, (candidate, value) in enumerate(zip(candidates, self._alone[b], strict=True)):
            if value > best and (candidate.drafter in active or candidate.at_least):
                best, pick = value, place
        return pick

    def _values_alone(self) -> list[list[float]]:
        """Of each candidate what `_pick` goes by, where there is a choice; requests new to a drafter are alike."""
        alone = cache(self._value_alone)
        return [
            [alone(one, weight) if one.drafter in self.users else -math.inf for one in own] if len(own) > 1 else []
            for own, weight in zip(self.candidates, self.weights, strict=True)
        ]

    def _value_alone(self, candidate: Candidate, weight: float) -> float:
        """The value of a step in which only this candidate drafts; the times of its drafter and the host are shared."""
        share, extra_s = 1 / self.users[candidate.drafter], self.extra_s / len(self.candidates)
        rows = tokens = float(len(self.candidates))
        best = -math.inf
        for place, (drafted, emitted) in enumerate(zip(candidate.drafted, candidate.emitted, strict=True)):
            rows, tokens = rows + drafted, tokens + weight * emitted
            if place + 1 >= candidate.at_least:
                draft_s = share * self.draft_s(candidate.drafter, place + 1) + candidate.entry_s
                best = max(best, self.value(tokens, self.step_s(rows) + draft_s + extra_s))
        return best


class _Admission:
    """Admits draft tokens of the chosen candidates, the likeliest per row first, and remembers the best count."""

    def __init__(self, step: _Step, chosen: Sequence[Candidate | None], active: frozenset[Hashable]) -> None:
        self.step, self.chosen, self.active = step, chosen, active
        self.budgets = [0 if candidate is None else candidate.at_least for candidate in chosen]
        self.rows, self.tokens, self.draft_s = float(len(chosen)), sum(step.weights), 0.0
        self.longest: dict[Hashable, int] = {}
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> tuple[list[int], float, float]:
        """Draft tokens of each request, expected tokens and seconds."""
        for b, candidate in enumerate(self.chosen):
            if candidate is not None:
                for place in range(candidate.at_least):
                    self._add(b, candidate, place)
                if candidate.drafter in self.active:
                    self.heap += self._offers(b, candidate, candidate.at_least)
        heapq.heapify(self.heap)
        step_s, value_of, heap = self.step.step_s, self.step.value, self.heap
        best_s = step_s(self.rows) + self.draft_s
        best_tokens, admitted, best = self.tokens, list[int](), 0
        most = value_of(best_tokens, best_s)
        while heap:
            _, b, place = heap[0]
            candidate = self.chosen[b]
            assert candidate is not None
            admitted.append(b)
            self._add(b, candidate, place)
            offers = self._offers(b, candidate, place + 1)
            if offers:
                heapq.heapreplace(heap, offers[0])
            else:
                heapq.heappop(heap)
            seconds = step_s(self.rows) + self.draft_s
            value = value_of(self.tokens, seconds)
            if value > most:
                best, best_tokens, best_s, most = len(admitted), self.tokens, seconds, value
        for b in admitted[:best]:
            self.budgets[b] += 1
        return self.budgets, best_tokens, best_s

    def _add(self, b: int, candidate: Candidate, place: int) -> None:
        if place < len(candidate.emitted):
            self.rows += candidate.drafted[place]
            self.tokens += self.step.weights[b] * candidate.emitted[place]
        if not self.longest:
            self.draft_s += self.step.extra_s
        if not place:
            self.draft_s += candidate.entry_s
        known = self.longest.get(candidate.drafter, 0)
        if place + 1 > known:
            before_s = self.step.draft_s(candidate.drafter, known) if known else 0.0
            self.longest[candidate.drafter] = place + 1
            self.draft_s += self.step.draft_s(candidate.drafter, place + 1) - before_s

    def _offers(self, b: int, candidate: Candidate, place: int) -> list[tuple[float, int, int]]:
        """The request's next draft token by what it gains per row, if there is one."""
        if place < len(candidate.emitted) and candidate.emitted[place] > 0:
            gain = self.step.weights[b] * candidate.emitted[place] / max(candidate.drafted[place], 1e-9)
            return [(-gain, b, place)]
        return []


@dataclass
class TokenRate:
    """Long-run tokens per second over those without a draft: comparable across loads, which change both."""

    saved_s: float = 0.0
    took_s: float = 0.0

    @property
    def of_late(self) -> float:
        """0 while nothing is known."""
        return self.saved_s / self.took_s if self.took_s else 0.0

    def observe(self, plain_s: float, took_s: float, keep: float) -> None:
        """Take in a step whose tokens would have taken `plain_s` without a draft."""
        self.saved_s = keep * self.saved_s + plain_s
        self.took_s = keep * self.took_s + took_s
