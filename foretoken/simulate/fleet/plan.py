"""The cheapest fleet of each setting that keeps the promise: by what its autoscaler aims at, and of a fixed number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from foretoken.simulate.fleet.day import Aim, FleetDay, Hour, first_replicas, late_share, p95, together
from foretoken.simulate.fleet.options import LATE_SHARE, FleetOptions
from foretoken.simulate.fleet.speed import ReplicaSpeed

AUTOSCALED, DEFAULT, FIXED = "autoscaled", "default", "fixed"
# What the autoscaler aims at, as shares of a full batch; beyond 1 with a queue behind it.
_AIMS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
_PAST_BEST = 3  # aims that are tried beyond the cheapest


@dataclass(frozen=True)
class FleetHour:
    """An hour of the day. `first_s_p95` and `token_s_p95` are None where more than 5 % of the requests are refused."""

    hour: int
    requests_per_s: float
    replicas: float
    first_s_p95: float | None
    token_s_p95: float | None
    refused: float
    interrupted: float


@dataclass(frozen=True)
class FleetRow:
    """A day of one setting.

    `replica_tokens` is the autoscaler's aim; None: its default, or a fixed number. `meets` says whether the
    promise is kept over the day. `busy` is the share of their time in which replicas have a request. `replica_hours`
    are paid ones, with those that start or drain.
    """

    setting: str
    scaling: str
    replica_tokens: int | None
    meets: bool
    late_share: float
    replicas_mean: float
    replicas_max: int
    replica_hours: float
    busy: float
    num_requests: float
    num_tokens: float
    refused_share: float
    interrupted: float
    first_s_p95: float | None
    token_s_p95: float | None
    worst_first_s_p95: float | None
    price_per_million_tokens: float
    hours: tuple[FleetHour, ...]


@dataclass(frozen=True)
class TriedDay:
    """A day that was run: what its autoscaler aimed at (None: it had none), its hours, and all of them `together`."""

    aim: Aim | None
    hours: tuple[Hour, ...]
    day: Hour
    late_share: float
    price_per_million_tokens: float

    @property
    def meets(self) -> bool:
        """Whether the promise was kept."""
        return self.late_share <= LATE_SHARE


@dataclass(frozen=True)
class FleetPlanner:
    """Runs days under `options`, at a price per replica and hour."""

    options: FleetOptions
    price_per_hour: float
    seed: int = 0

    def autoscaled(self, setting: str, speed: ReplicaSpeed, say: Callable[[str], None]) -> FleetRow:
        """The cheapest of some aims of the autoscaler that keeps the promise, else the one that misses it least.

        Costs do not fall steadily with a larger aim: near a full batch a lack of replicas shows late, as a queue that
        then asks for too many.
        """
        tried: list[TriedDay] = []
        for number, load in enumerate(_AIMS):
            say(f"{setting}, autoscaled: day {number + 1} of at most {len(_AIMS)}")
            tried.append(self.day(speed, Aim(max(1, round(speed.queued_tokens(load * speed.max_batch_size)))), None))
            if number - tried.index(_best(tried)) >= _PAST_BEST:
                break
        return self.row(setting, speed, _best(tried))

    def default(self, setting: str, speed: ReplicaSpeed, say: Callable[[str], None]) -> FleetRow:
        """What the autoscaler does that is given no aim."""
        say(f"{setting}, autoscaled without an aim")
        return self.row(setting, speed, self.day(speed, Aim(), None))

    def fixed(self, setting: str, speed: ReplicaSpeed, say: Callable[[str], None]) -> FleetRow:
        """The smallest fixed number of replicas that keeps the promise, to within 2 %, else the largest allowed."""
        low, high = self.options.min_replicas - 1, self.options.max_replicas
        first = first_replicas(speed, max(self.options.traffic.rates), self.options)
        for number, replicas in enumerate(_rising(first, high)):
            say(f"{setting}, fixed: day {number + 1}")
            best = self.day(speed, None, replicas)
            if best.meets:
                high = replicas
                break
            low = replicas
        while best.meets and high - low > max(1, high // 50):
            say(f"{setting}, fixed: {low + 1} to {high} replicas")
            middle = (low + high) // 2
            tried = self.day(speed, None, middle)
            if tried.meets:
                best, high = tried, middle
            else:
                low = middle
        return self.row(setting, speed, best)

    def day(self, speed: ReplicaSpeed, aim: Aim | None, replicas: int | None) -> TriedDay:
        """One day; `replicas` None: begins with as many as its traffic needs then."""
        begin = first_replicas(speed, self.options.traffic.rate(0.0), self.options) if replicas is None else replicas
        hours = FleetDay(speed, self.options, aim, begin, self.seed).run()
        day = together(hours)
        tokens = day.served * speed.mix.output_tokens
        price = self.price_per_hour * day.paid_s / 3600 / tokens * 1e6 if tokens else math.inf
        return TriedDay(aim, tuple(hours), day, late_share(speed, day, self.options), price)

    def row(self, setting: str, speed: ReplicaSpeed, tried: TriedDay) -> FleetRow:
        """The figures of a day."""
        day = tried.day
        first_s, token_s = p95(speed, day, self.options)
        shown = tuple(self._hour(number, speed, hour) for number, hour in enumerate(tried.hours))
        worst = max(math.inf if one.first_s_p95 is None else one.first_s_p95 for one in shown)
        return FleetRow(
            setting=setting,
            scaling=FIXED if tried.aim is None else DEFAULT if tried.aim.tokens is None else AUTOSCALED,
            replica_tokens=None if tried.aim is None else tried.aim.tokens,
            meets=tried.meets,
            late_share=tried.late_share,
            replicas_mean=day.replicas,
            replicas_max=day.max_replicas,
            replica_hours=day.paid_s / 3600,
            busy=day.busy_s / day.live_s if day.live_s else 0.0,
            num_requests=day.arrivals,
            num_tokens=day.served * speed.mix.output_tokens,
            refused_share=day.refused / day.arrivals,
            interrupted=day.interrupted,
            first_s_p95=_finite(first_s),
            token_s_p95=_finite(token_s),
            worst_first_s_p95=_finite(worst),
            price_per_million_tokens=tried.price_per_million_tokens,
            hours=shown,
        )

    def _hour(self, number: int, speed: ReplicaSpeed, hour: Hour) -> FleetHour:
        first_s, token_s = p95(speed, hour, self.options)
        return FleetHour(
            hour=number,
            requests_per_s=hour.arrivals / hour.seconds,
            replicas=hour.replicas,
            first_s_p95=_finite(first_s),
            token_s_p95=_finite(token_s),
            refused=hour.refused,
            interrupted=hour.interrupted,
        )


def _best(tried: Sequence[TriedDay]) -> TriedDay:
    """The cheapest that keeps the promise, else the one that misses it least."""
    kept = [one for one in tried if one.meets]
    if kept:
        return min(kept, key=lambda one: one.price_per_million_tokens)
    return min(tried, key=lambda one: one.late_share)


def _rising(first: int, most: int) -> Iterator[int]:
    """From `first` on a quarter more each time, at last `most`."""
    while first < most:
        yield first
        first = max(first + 1, first * 5 // 4)
    yield most


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
