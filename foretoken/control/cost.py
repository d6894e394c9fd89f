"""What a step takes as a function of a count (rows of the target, guesses of a drafter), learnt from steps that ran."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from foretoken.plan.profile import Curve, Profile

_EXACT_COUNTS = 16  # counts up to here are told apart, larger ones in steps of about an eighth
_MEMORY_STEPS = 12  # observations that an average goes back over
_OUTLIER = 3.0  # a single observation counts as at most this many times what is known: machines pause
_MOOD_DOUBT, _MOOD_DRIFT = (
    1.0,
    7e-5,
)  # variances, relative: of the machine's mood before anything ran, and what every step adds to it
_SHAPE_DOUBT, _LEAST_SHAPE_DOUBT = 0.15**2, 2e-4  # of a count's place on the curve beforehand, and however often it ran
_STEP_DOUBT = 0.1**2  # of one step
_BOUND, _LEAST_BOUND = (
    3.0,
    0.5,
)  # a step counts as at most so many deviations slower than expected, or as half as slow again
_LEAST_CHANGE = 0.1  # what one observation leaves of an estimate
_LEAST_S = 1e-9
_OPTIMISM = 48  # counts never tried are taken to cost one forty-eighth of a step each, so that they are tried


class CostTable:
    """Seconds by count: moving averages where something was measured, straight lines between.

    Outside of what was measured a target's step is taken to cost nearly the same for any count (`grows` False: weights
    are read once for all rows), a drafter's as much again for every further guess (`grows` True: one after the other).
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

    def reaches(self, count: int) -> bool:
        """Whether so small a count was measured, or a smaller one: what `seconds` says of it is then no guess."""
        return bool(self._counts) and self._counts[0] <= count

    @property
    def largest(self) -> int:
        """The largest count of which something is known, 0 if none."""
        return self._counts[-1] if self._counts else 0

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


@dataclass
class _Off:
    """By what factor one count lies off the scaled prior, and how uncertain that is (a variance)."""

    factor: float = 1.0
    doubt: float = _SHAPE_DOUBT


class SeededCost(CostTable):
    """A table that begins with a measured curve, its prior, and is soon ruled by what live steps take.

    A count takes `mood * off(count) * prior(count)`. The mood is one factor for all counts: a machine under another
    load or at another clock is uniformly slower or faster than when the curve was measured, and counts that were not
    run lately follow it too. `off` is what a count takes beside that, a factor for each count that ran, straight lines
    between them, the nearest one outside.

    An observation that surprises is laid to the mood and to the count's own factor by how uncertain the two are: two
    scalar Kalman filters that share one innovation. At first nothing is known of the mood, so the first step sets it;
    then it drifts with a memory of about a dozen steps. A count's factor is trusted to 15 % before the count has run,
    and is settled after a few steps. A step far slower than expected counts as less: machines pause.
    """

    def __init__(self, prior: Curve, grows: bool = False) -> None:
        assert prior.points
        super().__init__(grows)
        self._prior = prior
        self._mood, self._mood_doubt = 1.0, _MOOD_DOUBT
        self._off: dict[int, _Off] = {}

    @property
    def is_empty(self) -> bool:
        """Never: the prior says something of every count."""
        return False

    def reaches(self, count: int) -> bool:  # noqa: ARG002 - the prior knows the shape
        """Whether a step ran: then the mood is known, and with it every count."""
        return bool(self._counts)

    @property
    def largest(self) -> int:
        """The largest count of which something is known."""
        return max(super().largest, self._prior.points[-1][0])

    @property
    def mood(self) -> float:
        """By what factor the machine is slower now than the prior says."""
        return self._mood

    def observe(self, count: int, seconds: float) -> None:
        """Take in one measurement."""
        bucket = _bucket(count)
        off = self._off.get(bucket)
        if off is None:
            off = self._off[bucket] = _Off(self._factor(bucket))
            insort(self._counts, bucket)
        self._mood_doubt += _MOOD_DRIFT
        total = self._mood_doubt + off.doubt + _STEP_DOUBT
        surprise = min(
            seconds / (self._mood * off.factor * self._prior_s(count)) - 1, max(_LEAST_BOUND, _BOUND * total**0.5)
        )
        to_mood, to_count = self._mood_doubt / total, off.doubt / total
        self._mood *= max(_LEAST_CHANGE, 1 + to_mood * surprise)
        off.factor *= max(_LEAST_CHANGE, 1 + to_count * surprise)
        self._mood_doubt *= 1 - to_mood
        off.doubt = max(_LEAST_SHAPE_DOUBT, off.doubt * (1 - to_count))

    def seconds(self, count: float) -> float:
        """What `count` is expected to take."""
        return self._mood * self._factor(count) * self._prior_s(count)

    def as_dict(self) -> dict[int, float]:
        """Expected seconds of the counts that ran, ascending."""
        return {count: self.seconds(count) for count in self._counts}

    def _prior_s(self, count: float) -> float:
        last, last_s = self._prior.points[-1]
        if self._grows and len(self._prior.points) == 1:
            return max(last_s * count / last, _LEAST_S)
        return max(self._prior.seconds(count), _LEAST_S)

    def _factor(self, count: float) -> float:
        if not self._counts:
            return 1.0
        place = bisect_left(self._counts, count)
        above = self._counts[min(place, len(self._counts) - 1)]
        if place in (0, len(self._counts)) or above == count:
            return self._off[above].factor
        below = self._counts[place - 1]
        share = (count - below) / (above - below)
        return (1 - share) * self._off[below].factor + share * self._off[above].factor


class StepCosts:
    """Seconds of a target's step by rows, told apart by how many requests they belong to: attention and bookkeeping go
    by request.

    A number of requests that was not seen yet is taken to cost as much more, at any count of rows, as its first step
    took beyond the nearest one known.
    """

    def __init__(self) -> None:
        self._tables: dict[int, CostTable] = {}

    def at(self, num_requests: int) -> CostTable:
        """The table of steps of about so many requests, else of the nearest number; an empty one while nothing is
        known.
        """
        if not self._tables:
            self._tables[load_of(num_requests)] = CostTable()
        return self._nearest(load_of(num_requests))

    def seed(self, table: CostTable) -> None:
        """Begin with `table` for a single request."""
        assert all(known.is_empty for known in self._tables.values())
        self._tables = {load_of(1): table}

    def observe(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """Take in one step."""
        load = load_of(num_requests)
        nearest = self._nearest(load) if self._tables else CostTable()
        if load not in self._tables and nearest.is_empty:
            self._tables = {load: CostTable()}
        elif load not in self._tables:
            extra_s = seconds - nearest.seconds(num_rows)
            counts = sorted({*nearest.as_dict(), num_rows})
            self._tables[load] = SeededCost(
                Curve(tuple((count, max(_LEAST_S, nearest.seconds(count) + extra_s)) for count in counts))
            )
        self._tables[load].observe(num_rows, seconds)

    def _nearest(self, load: int) -> CostTable:
        return self._tables[min(self._tables, key=lambda known: abs(known - load))]


def seed_tables(profile: Profile) -> tuple[CostTable, dict[str, CostTable]]:
    """Tables that begin with `profile`: of the target's step by rows, its gaps filled by the roofline, and of every
    drafter by guesses.
    """
    rows = profile.rows if profile.roofline is None else Curve(profile.roofline.fill(profile.rows.points))
    drafters = {
        name: SeededCost(cost.guesses, grows=True) for name, cost in profile.drafters.items() if cost.guesses.points
    }
    return SeededCost(rows), dict(drafters)


def load_of(num_requests: int) -> int:
    """Numbers of requests that count as alike: two to a doubling."""
    return round(2 * math.log2(max(1, num_requests)))


def _bucket(count: int) -> int:
    if count <= _EXACT_COUNTS:
        return count
    step = 1 << (count.bit_length() - 4)
    return round(count / step) * step
