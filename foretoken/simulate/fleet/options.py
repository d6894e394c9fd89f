"""`FleetOptions`: a day of traffic, what breaks, what is promised, and how many replicas there may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from foretoken.errors import ConfigError
from foretoken.option import Settings
from foretoken.params import check_number, check_whole
from foretoken.simulate.fleet.occupancy import ROUTINGS

FLEET = "Fleet"  # the group of these options
DAY_S = 86_400.0
LATE_SHARE = 0.05  # of the requests, that may come later than promised
_POINTS = 96  # of a day's traffic: a quarter of an hour each
_PEAK_S = 20 * 3600.0
_REPLICA_LIMIT = 100_000
_setting = Settings(FLEET)


@dataclass(frozen=True)
class FleetOptions:
    """Traffic rises and falls once a day as a cosine, busiest at 20:00. Rates per second, times in the unit named.

    - `peak_rate`: requests of the whole fleet; `night_share`: of it, in the quietest hour.
    - `start_s`: from the decision to add or replace a replica until it serves.
    - `mtbf_h`: mean hours between two failures of one replica; 0: none fails. `outage_share`: of the replicas, lost at
      once in the busiest hour.
    - `p95_first_s`, `p95_token_ms`: what 95 % of the day's requests keep, refused ones counted as late.

    Raises:
        ConfigError, InputError: a value that cannot be planned with; names the field.
    """

    peak_rate: float = _setting(10.0, "Requests per second of the whole fleet in the busiest hour, with --fleet.")
    night_share: float = _setting(0.3, "Share of the peak rate in the quietest hour; 1 = steady.")
    min_replicas: int = _setting(2, "Fewest replicas.")
    max_replicas: int = _setting(1000, "Most replicas.")
    routing: str = _setting(
        "two",
        "Where a request goes: to the less loaded of two replicas, or to any one at random: {choices}.",
        choices=ROUTINGS,
    )
    scale_up_s: float = _setting(10.0, "Seconds of too many queued tokens before replicas are added.")
    scale_down_s: float = _setting(300.0, "Seconds of few queued tokens before replicas are drained.")
    start_s: float = _setting(60.0, "Seconds until a new replica serves.")
    mtbf_h: float = _setting(720.0, "Mean hours between two failures of one replica; 0 = none fails.")
    outage_share: float = _setting(0.0, "Share of the replicas that is lost at once in the busiest hour.")
    max_waiting: int = _setting(256, "Requests of a replica that may wait; further ones fail.")
    p95_first_s: float = _setting(2.0, "Seconds within which 95 % of the requests must get their first token.")
    p95_token_ms: float = _setting(200.0, "Mean milliseconds between tokens that 95 % of the requests must not exceed.")

    def __post_init__(self) -> None:
        check_number("peak_rate", self.peak_rate, low=0.0, high=1e9, open_low=True)
        check_number("night_share", self.night_share, low=0.0, high=1.0, open_low=True)
        check_number("outage_share", self.outage_share, low=0.0, high=0.9)
        check_whole("min_replicas", self.min_replicas, low=1, high=_REPLICA_LIMIT)
        check_whole("max_replicas", self.max_replicas, low=1, high=_REPLICA_LIMIT)
        check_whole("max_waiting", self.max_waiting, low=1, high=4096)
        for name in ("scale_up_s", "scale_down_s", "start_s"):
            check_number(name, getattr(self, name), low=0.0, high=DAY_S)
        for name in ("p95_first_s", "p95_token_ms"):
            check_number(name, getattr(self, name), low=0.0, high=1e9, open_low=True)
        if self.mtbf_h:
            check_number("mtbf_h", self.mtbf_h, low=1.0, high=1e9)
        if self.max_replicas < self.min_replicas:
            remedy = f"must be at least min_replicas, which is {self.min_replicas}"
            raise ConfigError("max_replicas", self.max_replicas, remedy)

    @cached_property
    def traffic(self) -> Traffic:
        """The day as a cosine."""
        low = self.night_share
        heights = (math.cos(2 * math.pi * (n * DAY_S / _POINTS - _PEAK_S) / DAY_S) for n in range(_POINTS))
        return Traffic(tuple(self.peak_rate * (low + (1 - low) * (1 + height) / 2) for height in heights))


@dataclass(frozen=True)
class Traffic:
    """Requests per second at equal distances over a day, straight lines between them and to the first again."""

    rates: tuple[float, ...]

    def rate(self, time_s: float) -> float:
        """Requests per second; time in seconds from midnight, before or after it too."""
        place = time_s % DAY_S / DAY_S * len(self.rates)
        low = int(place) % len(self.rates)
        high = (low + 1) % len(self.rates)
        return self.rates[low] + (place - int(place)) * (self.rates[high] - self.rates[low])

    @property
    def peak_s(self) -> float:
        """When it is busiest."""
        return max(range(len(self.rates)), key=self.rates.__getitem__) * DAY_S / len(self.rates)
