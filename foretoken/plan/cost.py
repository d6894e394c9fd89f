"""What a step takes as a function of a count (rows of the target, guesses of a drafter), learnt from steps that ran."""

from __future__ import annotations

from bisect import bisect_left, insort

_EXACT_COUNTS = 16  # counts up to here are told apart, larger ones in steps of about an eighth
_MEMORY_STEPS = 12  # observations that an average goes back over
_OUTLIER = 3.0  # a single observation counts as at most this many times what is known: machines pause
_OPTIMISM = 48  # counts never tried are taken to cost one forty-eighth of a step each, so that they are tried


class CostTable:
    """Seconds by count: moving averages where something was measured, straight lines between.

    Outside of what was measured a target's step is taken to cost nearly the same for any count (`grows` False: weights are read once
    for all rows), a drafter's as much again for every further guess (`grows` True: one after the other).
    """

    def __init__(self, grows: bool = False) -> None:
        self._grows = grows
        self._counts: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}
        self._weights: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not self._counts

    def observe(self, count: int, seconds: float) -> None:
        """Take in one measurement."""
        bucket = _bucket(count)
        if bucket not in self._seconds:
            insort(self._counts, bucket)
            self._seconds[bucket], self._weights[bucket] = seconds, 1
            return
        known, weight = self._seconds[bucket], min(self._weights[bucket] + 1, _MEMORY_STEPS)
        self._seconds[bucket] = known + (min(seconds, _OUTLIER * known) - known) / weight
        self._weights[bucket] = weight

    def seconds(self, count: float) -> float:
        """What `count` is expected to take; 0 while nothing is known."""
        if not self._counts:
            return 0.0
        place = bisect_left(self._counts, count)
        if place == len(self._counts):
            last = self._counts[-1]
            return self._seconds[last] * (count / last if self._grows else 1 + (count - last) / _OPTIMISM)
        above = self._counts[place]
        if above == count or place == 0:
            return self._seconds[above] * (count / above if self._grows else 1 / (1 + (above - count) / _OPTIMISM))
        below = self._counts[place - 1]
        share = (count - below) / (above - below)
        return (1 - share) * self._seconds[below] + share * self._seconds[above]

    def as_dict(self) -> dict[int, float]:
        """Measured seconds by count, ascending."""
        return {count: self._seconds[count] for count in self._counts}


def _bucket(count: int) -> int:
    if count <= _EXACT_COUNTS:
        return count
    step = 1 << (count.bit_length() - 4)
    return round(count / step) * step
