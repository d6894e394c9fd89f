"""Acceptance by day over a year, looked at every day: how often a drop is found that there is, or is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from foretoken.measure.sequential import ALPHA, drop_evidence
from foretoken.measure.stats import Array

RUNS, DAYS = 600, 364
NEEDED = 1 / ALPHA
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def _weekly(rng: np.random.Generator, size: tuple[int, int]) -> Array:
    """Two days in seven are low."""
    return rng.normal(size=size) - 2 * (np.arange(size[1]) % 7 > 4)


def _acceptance(rng: np.random.Generator, size: tuple[int, int]) -> Array:
    """The share of 500 tokens, whose chance varies from day to day, as texts do."""
    return rng.binomial(500, rng.beta(70, 30, size)) / 500


DRAWS: dict[str, Draw] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "outliers": lambda rng, size: rng.standard_t(3, size),
    "skewed": lambda rng, size: -rng.gamma(4, size=size),  # low days are far lower than high ones are higher
    "weekly": _weekly,
    "acceptance": _acceptance,
}


@pytest.mark.parametrize("days", DRAWS)
def test_a_year_without_a_drop_raises_no_alarm(days: str) -> None:
    evidence = drop_evidence(DRAWS[days](np.random.default_rng(0), (RUNS, DAYS)))
    alarms = int((evidence.max(axis=-1) >= NEEDED).sum())
    assert alarms <= ALPHA * RUNS + 3 * math.sqrt(ALPHA * (1 - ALPHA) * RUNS)  # that many come by chance


@pytest.mark.parametrize("num_before", [21, 60])
def test_a_drop_is_found_within_two_weeks(num_before: int) -> None:
    size = (RUNS, num_before + 14)
    values = np.random.default_rng(0).normal(size=size) - 3 * (np.arange(size[1]) >= num_before)
    found = drop_evidence(values)[:, num_before:].max(axis=-1) >= NEEDED
    assert found.mean() >= 0.9
