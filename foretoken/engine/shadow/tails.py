"""Tails of the distributions that the tests of tokens need."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch


def upper_tail(z: float, skew: float) -> float:
    """P(Z > z) for a standardised sum of this skewness: a gamma distribution on the long tail, the normal distribution
    on the short one.

    Both are conservative for sums of rare events, whose kurtosis is below the gamma distribution's.
    """
    if skew < 1e-4:
        return math.erfc(z / math.sqrt(2)) / 2
    shape = 4 / skew**2
    place = shape + z * math.sqrt(shape)
    return _gamma_tail(shape, place) if place > 0 else 1.0


def _gamma_tail(shape: float, place: float) -> float:
    return float(
        torch.special.gammaincc(torch.tensor(shape, dtype=torch.float64), torch.tensor(place, dtype=torch.float64))
    )


def chi2_tail(value: float, freedom: int) -> float:
    """P(X > value) for a chi-square variable."""
    return _gamma_tail(freedom / 2, value / 2)


def quantile(level: float, skew: float) -> float:
    """The z that is exceeded with probability `level`."""
    return _solve(lambda z: upper_tail(z, skew) <= level, 40.0)


@cache
def noncentrality(freedom: int, level: float, power: float) -> float:
    """The noncentrality that a chi-square test at `level` detects with probability `power`."""
    border = _solve(lambda x: chi2_tail(x, freedom) <= level, 1000.0)
    counts = torch.arange(2000, dtype=torch.float64)
    tails = torch.special.gammaincc(freedom / 2 + counts, torch.full_like(counts, border / 2))

    def seen(shift: float) -> bool:
        weights = torch.exp(counts * math.log(shift / 2) - shift / 2 - torch.lgamma(counts + 1))  # Poisson
        return float((weights * tails).sum()) >= power

    return _solve(seen, 1000.0, low=1e-6)


def _solve(reached: Callable[[float], bool], high: float, low: float = 0.0) -> float:
    """The smallest number in [low, high] from which on `reached` holds, by bisection."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
