"""A day of a fleet: requests come, replicas fail, are added and drained, and all of it is paid for."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.control.autoscaling import AIM_SHARE, stepped_replicas, wanted_replicas
from foretoken.simulate.fleet.occupancy import Occupancy
from foretoken.simulate.fleet.options import DAY_S, LATE_SHARE, FleetOptions
from foretoken.simulate.fleet.speed import ReplicaSpeed

TICK_S = 5.0
_WARM_S = 7200.0  # before midnight, not counted
_FIRST_LOAD = 0.6
_HOURS = 24


@dataclass(frozen=True)
class Aim:
    """What the autoscaler wants of a replica: `tokens` of its requests, or (None) `AIM_SHARE` of a full batch."""

    tokens: int | None = None

    @property
    def load(self) -> float:
        """In the unit of `loads`."""
        return AIM_SHARE if self.tokens is None else self.tokens

    def loads(self, speed: ReplicaSpeed, most: int) -> list[float]:
        """Of a replica, by the number of its requests up to `most`."""
        present = range(most + 1)
        if self.tokens is None:
            return [count / speed.max_batch_size for count in present]
        return [*map(speed.queued_tokens, present)]


@dataclass
class Autoscaler:
    """Ray Serve's steps and delays before `wanted_replicas`: what is wanted must be so until the delay is over."""

    aim: float
    options: FleetOptions
    target: int
    _up_s: float = 0.0
    _down_s: float = 0.0

    def decide(self, load: float, live: int, seconds: float) -> int:
        """The number of replicas from now on, of which `live` serve, at a load of all of them in the aim's unit."""
        wanted = stepped_replicas(wanted_replicas(load, load, 0.0, self.aim, self.aim), live)
        wanted = min(self.options.max_replicas, max(self.options.min_replicas, wanted))
        self._up_s = self._up_s + seconds if wanted > self.target else 0.0
        self._down_s = self._down_s + seconds if wanted < self.target else 0.0
        if self._up_s > self.options.scale_up_s or self._down_s > self.options.scale_down_s:
            self.target, self._up_s, self._down_s = wanted, 0.0, 0.0
        return self.target


@dataclass
class Hour:
    """What is counted in an hour, or in a day: `found` requests by how many others they found at their replica.

    `interrupted` were in flight at a replica that failed, and came again. `paid_s` and `live_s` are replica-seconds.
    """

    found: list[float] = field(default_factory=list)
    arrivals: float = 0.0
    refused: float = 0.0
    interrupted: float = 0.0
    busy_s: float = 0.0
    live_s: float = 0.0
    paid_s: float = 0.0
    seconds: float = 0.0
    max_replicas: int = 0

    def count(self, shares: Sequence[float], arrivals: float) -> None:
        """Take in requests by what they found."""
        self.arrivals += arrivals
        self.found += [0.0] * (len(shares) - len(self.found))
        self.found[: len(shares)] = [one + share * arrivals for one, share in zip(self.found, shares)]  # noqa: B905

    @property
    def replicas(self) -> float:
        """That serve, on average."""
        return self.live_s / self.seconds

    @property
    def served(self) -> float:
        """Requests that were answered."""
        return self.arrivals - self.refused


def together(hours: Sequence[Hour]) -> Hour:
    """The sums of hours."""
    total = Hour()
    for hour in hours:
        total.count([one / hour.arrivals if hour.arrivals else 0.0 for one in hour.found], hour.arrivals)
        for name in ("refused", "interrupted", "busy_s", "live_s", "paid_s", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(hour, name))
        total.max_replicas = max(total.max_replicas, hour.max_replicas)
    return total


class FleetDay:
    """Runs one day of replicas of `speed`; the same arguments give the same day."""

    def __init__(self, speed: ReplicaSpeed, options: FleetOptions, aim: Aim | None, replicas: int, seed: int) -> None:
        """`aim` is the autoscaler's; None: always `replicas`, with which the day begins."""
        self._speed, self._traffic, self._options = speed, options.traffic, options
        self._scaler = None if aim is None else Autoscaler(aim.load, options, replicas)
        self._live, self._target = replicas, replicas
        self._starting: list[tuple[float, int]] = []  # when so many serve
        self._again = 0.0  # interrupted requests that come again
        self._occupancy = Occupancy([1.0], speed.max_batch_size + options.max_waiting, options.routing)
        self._finish_rates = [*map(speed.finish_rate, range(self._occupancy.most + 1))]
        self._loads = [] if aim is None else aim.loads(speed, self._occupancy.most)
        self._rng = random.Random(f"failures {seed}")

    def run(self) -> list[Hour]:
        """Its hours, from midnight."""
        hours = [Hour() for _ in range(_HOURS)]
        for tick in range(int(-_WARM_S / TICK_S), int(DAY_S / TICK_S)):
            now_s = tick * TICK_S
            self._tick(now_s, hours[int(now_s // 3600)] if now_s >= 0 else Hour())
        return hours

    def _tick(self, now_s: float, hour: Hour) -> None:
        self._fail(now_s, hour)
        ready = sum(count for when, count in self._starting if when <= now_s)
        self._starting = [(when, count) for when, count in self._starting if when > now_s]
        if ready:
            self._occupancy.join(self._live, ready)
            self._live += ready
        arrivals = self._traffic.rate(now_s) * TICK_S + self._again
        self._again = 0.0
        if self._live:
            self._serve(arrivals, hour)
        else:
            hour.count([], arrivals)
            hour.refused += arrivals
        hour.live_s += self._live * TICK_S
        self._scale(now_s, hour)
        num_starting = sum(count for _, count in self._starting)
        hour.paid_s += (self._live + num_starting) * TICK_S
        hour.seconds += TICK_S
        hour.max_replicas = max(hour.max_replicas, self._live + num_starting)

    def _serve(self, arrivals: float, hour: Hour) -> None:
        occupancy = self._occupancy
        occupancy.advance(arrivals / TICK_S / self._live, self._finish_rates, TICK_S)
        found = occupancy.found()
        hour.count(found, arrivals)
        if len(found) > occupancy.most:
            hour.refused += found[-1] * arrivals
        hour.busy_s += (1 - occupancy.shares[0]) * self._live * TICK_S

    def _fail(self, now_s: float, hour: Hour) -> None:
        """Some replicas are lost with their requests, which come again; others are started in their place."""
        options = self._options
        lost = _poisson(self._rng, self._live * TICK_S / (3600 * options.mtbf_h)) if options.mtbf_h else 0
        if options.outage_share and now_s <= self._traffic.peak_s < now_s + TICK_S:
            lost += round(options.outage_share * self._live)
        lost = min(lost, self._live)
        if lost:
            hour.interrupted += lost * self._occupancy.mean
            self._again += lost * self._occupancy.mean
            self._live -= lost
            self._starting.append((now_s + options.start_s, lost))
            if not self._live:
                self._occupancy.shares = [1.0]

    def _scale(self, now_s: float, hour: Hour) -> None:
        if self._scaler is None or not self._live:
            return
        load = self._live * self._occupancy.mean_of(self._loads)
        target = self._scaler.decide(load, self._live, TICK_S)
        more, self._target = target - self._target, target
        if more > 0:
            self._starting.append((now_s + self._options.start_s, more))
            return
        fewer = -more
        while fewer and self._starting:  # the last ones that were asked for
            when, count = self._starting.pop()
            cut = min(count, fewer)
            fewer -= cut
            if count > cut:
                self._starting.append((when, count - cut))
        fewer = min(fewer, self._live - 1)
        if fewer:
            # A drained replica goes on for those that it has: for the mean time that requests spend there.
            ended = self._occupancy.mean_of(self._finish_rates)
            hour.paid_s += fewer * (self._occupancy.mean / ended if ended else 0.0)
            self._live -= fewer


def first_replicas(speed: ReplicaSpeed, rate: float, options: FleetOptions) -> int:
    """Replicas to begin a day with, for `rate` requests per second."""
    needed = math.ceil(rate / (_FIRST_LOAD * max(speed.finish_rates)))
    return min(options.max_replicas, max(options.min_replicas, needed))


def late_share(speed: ReplicaSpeed, hour: Hour, options: FleetOptions) -> float:
    """The share of requests beyond the promise for the first token, or for the tokens after it: the larger of both."""
    if not hour.arrivals:
        return 0.0
    served = _served_shares(speed, hour, options)
    refused = hour.refused / hour.arrivals
    slow = sum(share for place, share in enumerate(served) if _token_s(speed, place) * 1e3 > options.p95_token_ms)
    return refused + max(speed.first_tail(served, options.p95_first_s), slow)


def p95(speed: ReplicaSpeed, hour: Hour, options: FleetOptions) -> tuple[float, float]:
    """Seconds to the first token, and between tokens, that 95 % of requests keep; infinite: too many are refused."""
    served = _served_shares(speed, hour, options)
    allowed = LATE_SHARE - (hour.refused / hour.arrivals if hour.arrivals else 0.0)
    if allowed <= 0:
        return math.inf, math.inf
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = math.sqrt(low * high) if low else high / 1e3
        low, high = (low, middle) if speed.first_tail(served, middle) <= allowed else (middle, high)
        if high < 1e-6 or high < low * (1 + 1e-6):
            break
    slow, between = 0.0, 0.0
    for token_s, share in sorted(((_token_s(speed, place), share) for place, share in enumerate(served)), reverse=True):
        slow += share
        if slow > allowed:
            between = token_s
            break
    return high, between


def _served_shares(speed: ReplicaSpeed, hour: Hour, options: FleetOptions) -> list[float]:
    most = speed.max_batch_size + options.max_waiting
    return [one / hour.arrivals for one in hour.found[:most]] if hour.arrivals else []


def _token_s(speed: ReplicaSpeed, found: int) -> float:
    return speed.token_s[min(found, speed.max_batch_size - 1)]


def _poisson(rng: random.Random, mean: float) -> int:
    """One draw: how many arrivals of unit rate come before `mean`."""
    count, now = 0, rng.expovariate(1.0)
    while now < mean:
        count, now = count + 1, now + rng.expovariate(1.0)
    return count
