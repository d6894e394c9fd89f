"""The share of replicas that have n requests, as it changes while requests come and end.

The distribution of one replica under Poisson arrivals, solved forward in time (Kolmogorov). Arrivals that go to a
replica at random divide into independent Poisson streams, so this is exact for any number of replicas. To the less
loaded of two it is the limit of many (Vvedenskaya, Dobrushin and Karpelevich, 1996; Mitzenmacher, 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

ROUTINGS = ("two", "random")
_TINY = 1e-10
_MARGIN = 16
_PASSES = 2  # over arrival rates that depend on the result


@dataclass
class Occupancy:
    """`shares` of replicas with 0, 1, ... requests; `most` is where further requests are refused."""

    shares: list[float]
    most: int
    routing: str

    @property
    def mean(self) -> float:
        """Requests of a replica, on average."""
        return sum(present * share for present, share in enumerate(self.shares))

    def mean_of(self, values: Sequence[float]) -> float:
        """The average over replicas of `values` by number of requests."""
        return float(sum(map(mul, self.shares, values)))

    def found(self) -> list[float]:
        """The shares of arrivals that find 0, 1, ... requests at the replica that gets them."""
        return [share * rate for share, rate in zip(self.shares, self._arrivals(self.shares, 1.0), strict=True)]

    def join(self, live: float, added: float) -> None:
        """`added` replicas without a request join `live` ones."""
        kept = live / (live + added)
        self.shares = [share * kept for share in self.shares]
        self.shares[0] += 1 - kept

    def advance(self, rate: float, finish_rates: Sequence[float], seconds: float) -> None:
        """`seconds` pass with `rate` arrivals per second and replica, `finish_rates` by number of requests: one
        implicit Euler step, stable for any length, whose fixed point is the stationary distribution.

        Numbers far above those that occur are left out: beyond them shares fall geometrically.
        """
        top = next(present for present in range(len(self.shares) - 1, -1, -1) if self.shares[present] > _TINY)
        size = min(self.most, top + top // 2 + _MARGIN + int(rate * seconds / 4)) + 1
        before = self.shares[:size] + [0.0] * (size - len(self.shares))
        deaths = [one * seconds for one in finish_rates[:size]]
        after = before
        for _ in range(_PASSES if self.routing == "two" else 1):
            births = [one * seconds for one in self._arrivals(after, rate)]
            births[-1] = 0.0  # refused
            after = _solved(before, births, deaths)
        total = sum(after)
        self.shares = [share / total for share in after]

    def _arrivals(self, shares: Sequence[float], rate: float) -> list[float]:
        """Arrivals per second at a replica with 0, 1, ... requests. To the less loaded of two: rate x (P(at least n) +
        P(more than n)).
        """
        if self.routing == "random":
            return [rate] * len(shares)
        rates, above = [], 0.0
        for share in reversed(shares):
            at_least = above + share
            rates.append(rate * (at_least + above))
            above = at_least
        rates.reverse()
        return rates


def _solved(before: Sequence[float], births: Sequence[float], deaths: Sequence[float]) -> list[float]:
    """x of x[n] (1 + births[n] + deaths[n]) - births[n-1] x[n-1] - deaths[n+1] x[n+1] = before[n]: the tridiagonal
    algorithm.
    """
    factors, sums = [], []
    carried = factor = birth = 0.0
    for old, born, died, next_died in zip(before, births, deaths, [*deaths[1:], 0.0], strict=True):
        pivot = 1 + born + died - birth * factor
        carried = (old + birth * carried) / pivot
        factor, birth = next_died / pivot, born
        factors.append(factor)
        sums.append(carried)
    carried, found = 0.0, []
    for factor, one in zip(reversed(factors), reversed(sums), strict=True):
        carried = one + factor * carried
        found.append(carried)
    found.reverse()
    return found
