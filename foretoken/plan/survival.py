"""How likely the guesses of a drafter are to be emitted, by their place in the draft, learnt from finished rounds.

Place k is the k-th node in the drafter's own order, best first: a smaller budget is then a prefix of a larger one, for chains and
for trees alike. A place that was not offered in a round says nothing about that round (the estimate is not censored by what the
budget cut off); a node behind a rejected one was offered and not emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_KEEP = 0.98  # weight of the past per round: about the last fifty rounds count
_KEEP_RECENT = 0.8  # of the short memory, about five rounds, that tells when the text has changed
_CHANGE = 0.45  # difference between the two that is no chance
_FORGET = 0.1  # what is left of the past then
_PRIOR_ROUNDS = 3.0  # what the prior is worth against rounds that were seen
_FIRST_CHANCE = 0.6  # of a first guess, before anything is known
_MOST_PLACES = 128


class Survival:
    """Moving averages by place; `prior` (other requests of the same drafter) fills in what was not seen yet."""

    def __init__(self, prior: Survival | None = None) -> None:
        self._prior = prior
        self._offered: list[float] = []  # rounds in which the place was within the budget
        self._drafted: list[float] = []  # ... and something was guessed there
        self._emitted: list[float] = []  # ... and was emitted
        self._recent = -1.0  # emitted guesses per round of late, as a share of those offered

    def observe(self, num_offered: int, chances: Sequence[float]) -> None:
        """Take in a round with a budget of `num_offered` in which the guesses were emitted with `chances`, in their order."""
        num_offered = min(max(num_offered, len(chances)), _MOST_PLACES)
        while len(self._offered) < num_offered:
            for counts in (self._offered, self._drafted, self._emitted):
                counts.append(0.0)
        self._note_change(num_offered, chances)
        for counts in (self._offered, self._drafted, self._emitted):  # also of places not offered: they may be tried again some day
            counts[:] = [_KEEP * count for count in counts]
        for place in range(num_offered):
            self._offered[place] += 1.0
            self._drafted[place] += place < len(chances)
            self._emitted[place] += chances[place] if place < len(chances) else 0.0

    def _note_change(self, num_offered: int, chances: Sequence[float]) -> None:
        """Forget most of the past when the first place has been doing far better or far worse of late."""
        first = chances[0] if chances else 0.0
        if not num_offered:
            return
        self._recent = first if self._recent < 0 else _KEEP_RECENT * self._recent + (1 - _KEEP_RECENT) * first
        known = self._emitted[0] / self._offered[0] if self._offered[0] else self._recent
        if abs(self._recent - known) > _CHANGE:
            for counts in (self._offered, self._drafted, self._emitted):
                counts[:] = [_FORGET * count for count in counts]

    def shares(self, num_places: int) -> tuple[list[float], list[float]]:
        """For each of the first places: the share of rounds in which something is guessed there, and in which it is emitted.

        A place that was never offered goes on like the places before it.
        """
        drafted: list[float] = []
        emitted: list[float] = []
        prior_drafted, prior_emitted = self._prior.shares(num_places) if self._prior is not None else ([], [])
        for place in range(num_places):
            d, e = _continued(drafted, 1.0), min(_continued(emitted, _FIRST_CHANCE), _continued(drafted, 1.0))
            if self._prior is not None:
                d, e = prior_drafted[place], prior_emitted[place]
            if place < len(self._offered):
                weight = self._offered[place] + _PRIOR_ROUNDS
                d = (self._drafted[place] + _PRIOR_ROUNDS * d) / weight
                e = (self._emitted[place] + _PRIOR_ROUNDS * e) / weight
            elif self._offered:  # the request's own places tell more than other requests' deeper ones
                d, e = min(d, drafted[-1]), min(e, emitted[-1])
            drafted.append(d)
            emitted.append(min(e, d))
        return drafted, emitted


def _continued(values: Sequence[float], first: float) -> float:
    """The next value of a sequence of products that goes on at its mean rate; `first` where it begins."""
    if not values:
        return first
    last: float = values[-1]
    return last * math.pow(last, 1 / len(values))
