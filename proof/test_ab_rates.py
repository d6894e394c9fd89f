"""How often an A/B replay that is looked at after every block finds a difference where there is none, and how often it
finds one that is there.

A simulated replay is the means of its blocks: log-ratios of four requests. Under A/A the two sides are exchangeable, so
the noise is symmetric about 0, whatever its form: even (normal), with heavy tails (Student's t), or with rare long
pauses of the machine on either side. 2,000 runs of each kind are looked at after every block up to the last, the same
ones every time: a rate of 0.065 where 0.05 is allowed, or of 0.88 where 0.9 is asked for, would be seen with
probability 0.99. Before a release 10,000 runs see 0.056 and 0.893.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from foretoken.measure.sequential import MIN_BLOCKS, confidence_sequence, judge, widths

BLOCKS, AT_ONCE = 400, 2000
NUM_RUNS = [AT_ONCE, pytest.param(5 * AT_ONCE, marks=pytest.mark.release)]
PAIRS = 4
NOISE = 0.12  # standard deviation of the log-ratio of one request: two answers to the same prompt on a machine in use
MARGIN = math.log1p(0.03)

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


class Rates(NamedTuple):
    """Shares of runs that ever lay outside 0, that ever called B faster or slower, and that ever called the two
    equivalent.
    """

    outside: float
    differing: float
    equivalent: float


def normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.normal(0.0, NOISE / PAIRS**0.5, shape)


def heavy(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_t(3, (*shape, PAIRS)).mean(axis=2) * NOISE / 3**0.5


def pauses(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """One answer in fifty is held up, on either side, by a time about as long as itself."""
    held = (generator.random((2, *shape, PAIRS)) < 0.02) * generator.exponential(1.0, (2, *shape, PAIRS))
    return generator.normal(0.0, NOISE / 2, shape) + np.log1p(held[0]).mean(axis=2) - np.log1p(held[1]).mean(axis=2)


def looked_at(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends [runs, blocks] of the interval after every block; infinite before the first look."""
    counts = np.arange(1, means.shape[1] + 1, dtype=np.float64)
    centre = np.cumsum(means, axis=1) / counts
    squares = np.maximum(np.cumsum(means**2, axis=1) - counts * centre**2, 0.0)
    half = np.full(means.shape, np.inf)
    later = slice(MIN_BLOCKS - 1, None)
    deviations = np.sqrt(squares[:, later] / (counts[later] - 1))
    half[:, later] = deviations * widths(np.ones(len(counts[later])), counts[later])
    return centre - half, centre + half


def rates(noise: Noise, difference: float = 0.0, blocks: int = BLOCKS, runs: int = AT_ONCE) -> Rates:
    """What happened in `runs` runs."""
    generator, found = np.random.default_rng(31), np.zeros(3)
    for _ in range(runs // AT_ONCE):
        low, high = looked_at(noise(generator, (AT_ONCE, blocks)) + difference)
        within = (low > -MARGIN) & (high < MARGIN)
        outside = (low > 0) | (high < 0)
        found += [int(one.any(axis=1).sum()) for one in (outside, outside & ~within, within)]
    return Rates(*(found / runs).tolist())


def test_the_vectorised_look_is_the_one_that_a_run_takes() -> None:
    means = normal(np.random.default_rng(5), (1, 60)) + 0.05
    low, high = looked_at(means)
    for count in (MIN_BLOCKS, 20, 60):
        found = confidence_sequence(means[0, :count].tolist())
        assert found is not None
        assert (found.low, found.high) == pytest.approx((low[0, count - 1], high[0, count - 1]))
    assert judge(confidence_sequence(means[0, : MIN_BLOCKS - 1].tolist()), MARGIN) == "go on"


@pytest.mark.parametrize("runs", NUM_RUNS)
@pytest.mark.parametrize("noise", [normal, heavy, pauses])
def test_a_against_itself_is_found_different_in_at_most_one_run_of_twenty(noise: Noise, runs: int) -> None:
    """Ever, looked at after each of 400 blocks; also where whoever looks goes on after "equivalent"."""
    found = rates(noise, runs=runs)
    assert found.differing <= found.outside <= 0.05


def test_a_fixed_interval_looked_at_after_every_block_would_be_wrong_far_more_often() -> None:
    means = normal(np.random.default_rng(31), (AT_ONCE, BLOCKS))
    counts = np.arange(1, BLOCKS + 1)
    centre = np.cumsum(means, axis=1) / counts
    half = 1.96 * NOISE / PAIRS**0.5 / np.sqrt(counts)
    assert (np.abs(centre) > half)[:, MIN_BLOCKS - 1 :].any(axis=1).mean() > 0.25


@pytest.mark.parametrize("runs", NUM_RUNS)
@pytest.mark.parametrize("noise", [normal, heavy, pauses])
def test_a_difference_of_five_percent_is_found_in_nine_runs_of_ten(noise: Noise, runs: int) -> None:
    """Within 150 blocks, 600 requests, whichever way it goes."""
    for difference in (math.log(1.05), -math.log(1.05)):
        assert rates(noise, difference, blocks=150, runs=runs).differing >= 0.9


@pytest.mark.parametrize("runs", NUM_RUNS)
@pytest.mark.parametrize("noise", [normal, heavy, pauses])
def test_a_difference_of_the_margin_is_seldom_called_equivalent(noise: Noise, runs: int) -> None:
    assert rates(noise, MARGIN, runs=runs).equivalent <= 0.05


@pytest.mark.parametrize("runs", NUM_RUNS)
def test_without_a_difference_a_run_ends_as_equivalent(runs: int) -> None:
    assert rates(normal, runs=runs).equivalent >= 0.9


def live(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Pairs of blocks of live traffic: 20 requests in each, whose times vary by 0.3, at a pace that drifts by a tenth
    and is remembered from block to block; which server is first is drawn for each pair.
    """
    runs, pairs = shape
    pace, drift = generator.normal(0.0, 0.1, runs), np.empty((runs, 2 * pairs))
    for block in range(2 * pairs):
        pace = 0.8 * pace + generator.normal(0.0, 0.06, runs)
        drift[:, block] = pace
    means = drift + generator.normal(0.0, 0.3 / 20**0.5, drift.shape)
    sign = np.where(generator.random(shape) < 0.5, 1.0, -1.0)
    return sign * (means[:, ::2] - means[:, 1::2])


@pytest.mark.parametrize("runs", NUM_RUNS)
def test_live_traffic_without_a_difference_is_found_different_in_at_most_one_run_of_twenty(runs: int) -> None:
    assert rates(live, runs=runs).differing <= 0.05


@pytest.mark.parametrize("runs", NUM_RUNS)
def test_live_traffic_shows_a_difference_of_five_percent_in_nine_runs_of_ten(runs: int) -> None:
    """Within 400 pairs, whichever way it goes."""
    for difference in (math.log(1.05), -math.log(1.05)):
        assert rates(live, difference, runs=runs).differing >= 0.9
