"""What steps of the target and rounds of drafters take, learnt from those that ran, maybe beginning with a profile; and
what speculation has gained and lost against plain decoding.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache

from foretoken.control.config import DEFAULT, CostConfig, PolicyConfig
from foretoken.plan.profile import Curve, Profile

_MIN_S = 1e-9  # a clock may stand still


@dataclass
class _Offset:
    """By what factor one count lies off the scaled prior, the variance of that, and what the prior says of it."""

    factor: float
    variance: float
    prior_s: float


class CostTable:
    """Seconds by count: `speed_factor * offset(count) * prior(count)`.

    The prior is a measured curve, or else the first observation: then any count takes nearly the same (`grows` False: a
    target's weights are read once for all rows), or as much again for each further one (`grows` True: a drafter's
    draft tokens come one after the other). The speed factor is common to all counts: a machine under another load or at
    another clock is uniformly slower or faster, and counts that were not run lately follow. `offset` is what a count
    takes beside that: a factor for each count that ran, straight lines between them, the nearest one outside.

    An observation that differs from what was expected is attributed to the speed factor and to the count's offset by
    their variances: two scalar Kalman filters that share one innovation. A step far slower than expected counts as
    less: machines pause. Several such steps in a row are no pause: the speed factor takes all of them, and no count
    lags.
    """

    def __init__(self, prior: Curve | None = None, grows: bool = False, config: CostConfig = DEFAULT.cost) -> None:
        assert prior is None or prior.points
        self.config, self._grows = config, grows
        self._prior = prior
        self._first: tuple[int, float] | None = None  # stands for the prior where none was measured
        self._speed, self._speed_variance = 1.0, config.speed_variance
        self._counts: list[int] = []  # that ran, ascending
        self._offsets: dict[float, _Offset] = {}
        self._num_slow = self._num_fast = 0  # in a row, far off what was expected

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return self._prior is None and self._first is None

    @property
    def largest(self) -> int:
        """The largest count of which something is known, 0 if none."""
        return max(self._counts[-1] if self._counts else 0, self._prior.points[-1][0] if self._prior else 0)

    @property
    def counts(self) -> set[int]:
        """The counts of which something is known, run or measured beforehand."""
        return {*self._counts, *(count for count, _ in (self._prior.points if self._prior else ()))}

    @property
    def speed_factor(self) -> float:
        """By what factor the machine is slower now than the prior says."""
        return self._speed

    def reaches(self, count: int) -> bool:
        """Whether what `seconds` says of `count` rests on a measurement of it, of a smaller count, or of the curve."""
        return bool(self._counts) and (self._prior is not None or self._counts[0] <= count)

    def observe(self, count: int, seconds: float) -> None:
        """Take in one measurement."""
        config, seconds = self.config, max(seconds, _MIN_S)
        if self.is_empty:
            self._first = (count, seconds)
        bucket = _bucket(count, config.exact_counts)
        offset = self._offsets.get(bucket)
        if offset is None:
            variance = config.first_variance if self._counts else 0.0
            variance = config.shape_variance if self._prior is not None else variance
            offset = self._offsets[bucket] = _Offset(self._offset(bucket), variance, self._prior_s(bucket))
            insort(self._counts, bucket)
        self._speed_variance += config.speed_drift
        ratio = seconds / (self._speed * offset.factor * self._prior_s(count))
        if self._has_new_pace(ratio):
            self._speed_variance = config.speed_variance
            offset.variance = min(offset.variance, config.shape_variance)
        total = self._speed_variance + offset.variance + config.step_variance
        surprise = min(ratio - 1, max(config.min_outlier, config.outlier_deviations * total**0.5))
        to_speed, to_count = self._speed_variance / total, offset.variance / total
        self._speed *= max(config.min_change, 1 + to_speed * surprise)
        offset.factor *= max(config.min_change, 1 + to_count * surprise)
        self._speed_variance *= 1 - to_speed
        offset.variance = max(config.min_shape_variance, offset.variance * (1 - to_count))

    def seconds(self, count: float) -> float:
        """What `count` is expected to take; 0 while nothing is known."""
        known = self._offsets.get(count)
        if known is not None:  # a decision asks for twenty counts, most of which ran
            return self._speed * known.factor * known.prior_s
        return 0.0 if self.is_empty else self._speed * self._offset(count) * self._prior_s(count)

    def as_dict(self) -> dict[int, float]:
        """Expected seconds of the counts that ran, ascending."""
        return {count: self.seconds(count) for count in self._counts}

    def _has_new_pace(self, ratio: float) -> bool:
        """Take in by what factor a step was slower than expected; whether the machine runs at another pace now."""
        self._num_slow = self._num_slow + 1 if ratio >= self.config.pace_ratio else 0
        self._num_fast = self._num_fast + 1 if ratio <= 1 / self.config.pace_ratio else 0
        if max(self._num_slow, self._num_fast) < self.config.pace_steps:
            return False
        self._num_slow = self._num_fast = 0
        return True

    def _prior_s(self, count: float) -> float:
        if self._prior is not None and not (self._grows and len(self._prior.points) == 1):
            return max(self._prior.seconds(count), _MIN_S)
        known, known_s = self._prior.points[0] if self._prior is not None else self._first or (1, _MIN_S)
        if self._grows:
            return max(known_s * count / known, _MIN_S)
        more = (count - known) / self.config.rows_per_step
        return known_s * (1 + more) if more >= 0 else known_s / (1 - more)

    def _offset(self, count: float) -> float:
        if not self._counts:
            return 1.0
        place = bisect_left(self._counts, count)
        above = self._counts[min(place, len(self._counts) - 1)]
        if place in (0, len(self._counts)) or above == count:
            return self._offsets[above].factor
        below = self._counts[place - 1]
        share = (count - below) / (above - below)
        return (1 - share) * self._offsets[below].factor + share * self._offsets[above].factor


class StepCosts:
    """Seconds of a target's step by rows, by how many requests they belong to: attention and bookkeeping go by request.

    A number of requests that was not seen yet is taken to cost as much more, at any count of rows, as its first step
    took beyond the nearest number known.
    """

    def __init__(self, prior: Curve | None = None, config: CostConfig = DEFAULT.cost) -> None:
        self.config, self._tables = config, {load_of(1): CostTable(prior, config=config)}

    def at(self, num_requests: int) -> CostTable:
        """The table of steps of about so many requests, else of the nearest number."""
        load = load_of(num_requests)
        return self._tables[load if load in self._tables else min(self._tables, key=lambda known: abs(known - load))]

    def observe(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """Take in one step."""
        load, nearest = load_of(num_requests), self.at(num_requests)
        if load not in self._tables and nearest.is_empty:
            self._tables = {load: CostTable(config=self.config)}
        elif load not in self._tables:
            extra_s = seconds - nearest.seconds(num_rows)
            counts = sorted({*nearest.counts, num_rows})
            points = tuple((count, max(_MIN_S, nearest.seconds(count) + extra_s)) for count in counts)
            self._tables[load] = CostTable(Curve(points), config=self.config)
        self._tables[load].observe(num_rows, seconds)


class HostCosts:
    """Seconds of the host's part of a step by number of requests, in steps with draft tokens and without.

    Scheduling, committing, observing and emitting count, drafting and deciding do not. Steps with draft tokens are kept
    as a multiple of those without: while nothing is drafted, it stands whatever the pace of the machine is.
    """

    def __init__(self, config: CostConfig = DEFAULT.cost) -> None:
        self._plain, self._multiple = CostTable(config=config), CostTable(config=config)

    def observe(self, num_requests: int, seconds: float, has_draft: bool) -> None:
        """Take in one step."""
        if not has_draft:
            self._plain.observe(num_requests, seconds)
        elif not self._plain.is_empty:
            self._multiple.observe(num_requests, seconds / self.plain_s(num_requests))

    def plain_s(self, num_requests: int) -> float:
        """What the host takes in a step without draft tokens; 0 while nothing is known."""
        return self._plain.seconds(num_requests)

    def extra_s(self, num_requests: int) -> float:
        """What the host takes longer in a step with draft tokens; 0 while nothing is known."""
        return max(0.0, self._multiple.seconds(num_requests) - 1) * self.plain_s(num_requests)


class DraftCosts:
    """Seconds of drafters by longest draft and number of requests; and of reading what is new to them."""

    def __init__(self, priors: Mapping[Hashable, Curve] | None = None, config: CostConfig = DEFAULT.cost) -> None:
        self.config = config
        self._tables = {drafter: {0: CostTable(prior, True, config)} for drafter, prior in (priors or {}).items()}
        self._read_token_s: dict[Hashable, float] = {}
        self._pace: dict[Hashable, tuple[int, float]] = {}  # load and plain step, in seconds, when it last drafted

    def knows(self, drafter: Hashable) -> bool:
        """Whether anything is known of the drafter."""
        return drafter in self._tables

    def seconds(self, drafter: Hashable, num_draft: int, num_requests: int = 1) -> float:
        """What a draft takes, as it was with about as many requests; 0 while nothing is known."""
        tables = self._tables.get(drafter)
        if not tables:
            return 0.0
        bucket = _batch_bucket(num_requests)
        return tables[min(tables, key=lambda known: abs(known - bucket))].seconds(num_draft)

    def read_s(self, drafter: Hashable, num_tokens: int) -> float:
        """What reading so many tokens takes before the drafter can draft."""
        return num_tokens * self._read_token_s.get(drafter, 0.0)

    def keep_pace(self, drafter: Hashable, num_requests: int, plain_s: float) -> None:
        """The drafter drafts while a plain step of `num_requests` takes `plain_s`."""
        self._pace[drafter] = (load_of(num_requests), plain_s)

    def drop_outpaced(self, num_requests: int, plain_s: float) -> None:
        """Forget what drafters took when plain steps of as many requests took much longer or shorter than now.

        Threads that wait for each other suffer more from a busy neighbour than one pass over the weights does: what a
        drafter took does not follow from the pace of the target, and a drafter that rests is not observed.
        """
        own = {drafter: before_s for drafter, (load, before_s) in self._pace.items() if load == load_of(num_requests)}
        ratios = {drafter: plain_s / before_s for drafter, before_s in own.items() if before_s > 0}
        for drafter, ratio in ratios.items():
            if 1 / self.config.pace_ratio < ratio < self.config.pace_ratio:
                continue
            del self._pace[drafter]
            self._tables.pop(drafter, None)
            if drafter in self._read_token_s:
                self._read_token_s[drafter] *= ratio

    def observe(self, drafter: Hashable, longest: int, seconds: float, num_requests: int, num_read_tokens: int) -> None:
        """Take in what a drafter took for `num_requests` requests, the longest draft being `longest`.

        A round in which it first read `num_read_tokens` of texts tells the cost of reading, not that of drafting.
        """
        if num_read_tokens:
            read_s = max(0.0, seconds - self.seconds(drafter, longest, num_requests))
            self._read_token_s[drafter] = read_s / num_read_tokens
            return
        tables = self._tables.setdefault(drafter, {})
        tables.setdefault(_batch_bucket(num_requests), CostTable(None, True, self.config)).observe(longest, seconds)


def priors_of(profile: Profile) -> tuple[Curve, dict[str, Curve]]:
    """The target's step by rows, its gaps filled by the roofline, and each drafter's rounds by draft tokens."""
    rows = profile.rows if profile.roofline is None else Curve(profile.roofline.fill(profile.rows.points))
    return rows, {name: cost.guesses for name, cost in profile.drafters.items() if cost.guesses.points}


@cache
def load_of(num_requests: int) -> int:
    """Numbers of requests that count as alike: two to a doubling."""
    return round(2 * math.log2(max(1, num_requests)))


def _batch_bucket(num_requests: int) -> int:
    """Numbers of requests at which a drafter takes about the same: powers of two, by their exponent."""
    return (max(1, num_requests) - 1).bit_length()


def _bucket(count: int, exact_counts: int) -> int:
    """The count that stands for `count`: never one of the exact ones, which must not tell what larger ones cost."""
    if count <= exact_counts:
        return count
    step = 1 << (count.bit_length() - 4)
    return max(exact_counts + 1, round(count / step) * step)


class TimeAccount:
    """Keeps what draft tokens, trials and deciding made steps longer against the tokens that draft tokens brought.

    `slack_s` is by how much decoding is ahead of plain decoding, with what it may fall behind. `credit_s` is what
    trials may lose; those that gain pay back.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.slack_s = self.credit_s = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """Whether decoding is behind by more than it may be."""
        return self.slack_s < 0

    @property
    def trial_s(self) -> float:
        """What a trial may lose now."""
        return max(0.0, min(self.credit_s, self.slack_s))

    def settle(self, base_s: float, gained: float, more_s: float, joined: float) -> None:
        """A step that takes `base_s` without a draft took `more_s` longer and brought `gained` tokens more per request;
        a share `joined` of its requests is new.
        """
        config = self.config
        share = config.slack_share + joined * config.first_slack_steps
        slack_s = self.slack_s + (share + gained) * base_s - more_s
        self.slack_s = max(config.min_slack_steps * base_s, min(config.max_slack_steps * base_s, slack_s))
