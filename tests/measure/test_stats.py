"""Intervals: their coverage for 5 to 100 groups, the distributions that they use, pairs, and what has none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from foretoken.measure.stats import (
    Estimate,
    Interval,
    beta_quantile,
    difference_interval,
    expanded_interval,
    geometric_mean,
    mean_estimate,
    paired_ratio,
    quantile_estimate,
    ratio,
    ratio_interval,
    student_quantile,
)

_SAMPLES = 150


def hits(truth: float, interval: Callable[[], Interval | Estimate | None]) -> int:
    """In how many of `_SAMPLES` samples the interval holds the true value; an end that is None holds everything."""
    found = [interval() for _ in range(_SAMPLES)]
    ends = [(-np.inf, np.inf) if one is None else (one.low, one.high) for one in found]
    return sum((low is None or low <= truth) and (high is None or truth <= high) for low, high in ends)


def acceptance(generator: np.random.Generator, count: int, rate: float = 0.6) -> np.ndarray:
    """Prompts with 40 drafted tokens each and a rate of their own, Beta about `rate`."""
    own = generator.beta(6 * rate, 6 * (1 - rate), size=count)
    return np.stack([generator.binomial(40, own), np.full(count, 40)], axis=1).astype(float)


@pytest.mark.parametrize(("count", "least"), [(5, 136), (10, 142), (40, 142)])
def test_an_interval_of_a_ratio_of_totals_covers(count: int, least: int) -> None:
    """Percentiles that are not expanded hold the rate in 123 and 139 of these 150 samples of 5 and 10 prompts."""
    generator = np.random.default_rng(7)
    assert hits(0.6, lambda: ratio_interval(acceptance(generator, count))) >= least


def test_an_interval_on_tokens_would_not_cover() -> None:
    generator = np.random.default_rng(7)

    def on_tokens() -> Interval:
        rate = ratio(acceptance(generator, 10)) or 0.0
        half = 1.96 * (rate * (1 - rate) / 400) ** 0.5
        return Interval(rate - half, rate + half)

    assert hits(0.6, on_tokens) < 0.7 * _SAMPLES


@pytest.mark.parametrize("count", [5, 10])
def test_an_interval_of_a_speedup_covers(count: int) -> None:
    """Prompts differ in speed and in speedup, both skewed. The plain percentile interval holds the speedup in 124 and
    134 of these 150 samples.
    """
    generator = np.random.default_rng(7)
    spread = 0.35

    def once() -> Interval:
        plain_s = generator.lognormal(0.0, 0.25, count)
        own_s = plain_s / generator.lognormal(0.4, spread, count)
        found = paired_ratio(
            {(p, 0): (64.0, own_s[p]) for p in range(count)}, {(p, 0): (64.0, plain_s[p]) for p in range(count)}
        )
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        return Interval(found.low, found.high)

    assert hits(np.exp(0.4 - spread**2 / 2), once) >= 140


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_an_interval_of_a_percentile_covers(share: float) -> None:
    """Of thirty gaps of each request, which share a factor, and of one value of each. No draw of 20 values exceeds the
    largest of them, so a bootstrap holds their 95th percentile in two samples of three.
    """
    generator, count = np.random.default_rng(5), 20

    def gaps() -> list[list[float]]:
        own = generator.lognormal(0.0, 0.3, size=(count, 1))
        return (own * generator.lognormal(0.0, 0.4, size=(count, 30))).tolist()

    truth = float(np.exp(0.5 * stats.norm.ppf(share)))
    assert hits(truth, lambda: quantile_estimate(gaps(), share)) >= 0.9 * _SAMPLES
    alone = float(np.exp(0.3 * stats.norm.ppf(share)))
    single = [generator.lognormal(0.0, 0.3, size=(count, 1)).tolist() for _ in range(_SAMPLES)]
    assert hits(alone, lambda: quantile_estimate(single.pop(), share)) >= 0.9 * _SAMPLES


def test_an_end_that_the_values_cannot_tell_is_open() -> None:
    values = [[float(value)] for value in range(1, 101)]
    assert quantile_estimate(values, 0.99) == Estimate(99.0, 95.0, None)
    half = quantile_estimate(values, 0.5)
    low, high = stats.binom.ppf([0.025, 0.975], 100, 0.5)  # ranks of the order statistics, the upper one counted from 0
    assert half == Estimate(50.0, low, high + 1)
    assert quantile_estimate(values[:6], 0.5) == Estimate(3.0, 1.0, 6.0)  # they miss it with probability 2 / 2 ** 6
    assert quantile_estimate(values[:4], 0.5) == Estimate(2.0)


def test_few_requests_with_many_values_tell_less_than_many_with_one() -> None:
    values = [float(value % 10) for value in range(300)]
    many = quantile_estimate([[value] for value in values], 0.5)
    few = quantile_estimate([[float(value)] * 30 for value in range(10)], 0.5)
    assert few.high is not None
    assert few.low is not None
    assert many.high is not None
    assert many.low is not None
    assert few.high - few.low > many.high - many.low
    means = [mean_estimate(groups) for groups in ([[value] for value in values], [[float(v)] * 30 for v in range(10)])]
    assert means[0].value == means[1].value == 4.5
    assert (means[1].low or 0.0) < (means[0].low or 0.0) < 4.5


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 99])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.9975])
def test_quantiles_are_students(probability: float, freedom: int) -> None:
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-4 if freedom > 1 else 1e-2)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (3.0, 4.5), (95.2, 5.8), (5000.5, 50.1)])
def test_quantiles_are_those_of_the_beta_distribution(a: float, b: float) -> None:
    for probability in (0.025, 0.5, 0.975):
        assert beta_quantile(probability, a, b) == pytest.approx(stats.beta.ppf(probability, a, b), abs=1e-5)


def test_pairs_make_the_interval_of_a_difference_narrow() -> None:
    before = acceptance(np.random.default_rng(3), 12)
    after = before - [2, 0]  # each prompt lost 2 of 40
    paired, unpaired = (difference_interval(before, after, paired, tail=0.025) for paired in (True, False))
    assert paired is not None
    assert unpaired is not None
    assert (paired.low, paired.high) == (pytest.approx(0.05), pytest.approx(0.05))
    assert unpaired.low < 0 < 0.1 < unpaired.high


def test_an_interval_for_many_cells_covers_with_few_prompts() -> None:
    """One of 20 differences that are compared together: draws of 5 prompts alone end above the loss in 12 of these 400
    samples, in place of 1.
    """
    generator = np.random.default_rng(5)
    missed = 0
    for _ in range(400):
        rates = generator.beta(4, 4, size=5)
        after = rates - 0.05 + generator.normal(0, 0.08, size=5)
        counts = [np.stack([rate * 40, np.full(5, 40.0)], axis=1) for rate in (rates, after)]
        found = difference_interval(counts[0], counts[1], True, tail=0.0025)
        assert found is not None
        missed += found.low > 0.05
    assert missed <= 4


def test_more_degrees_of_freedom_narrow_an_interval() -> None:
    values = np.random.default_rng(1).normal(size=5000)
    alone, of_many = expanded_interval(values, 3), expanded_interval(values, 3, freedom=48)
    assert alone is not None
    assert of_many is not None
    assert alone.low < of_many.low < of_many.high < alone.high


def test_what_has_no_ratio() -> None:
    assert ratio(np.zeros((3, 2))) is None
    assert ratio_interval(np.array([[1.0, 2.0]])) is None
    assert ratio_interval(np.array([[1.0, 2.0], [0.0, 0.0]])) is None
    assert difference_interval(np.ones((1, 2)), np.ones((1, 2)), True, 0.025) is None
    assert difference_interval(np.ones((1, 2)), np.ones((4, 2)), False, 0.025) is None
    few = np.array([[1.0, 2.0], [0.0, 0.0], *[[1.0, 4.0]] * 3])
    assert ratio_interval(few) is None
    some = ratio_interval(np.concatenate([few, [[1.0, 4.0]]]))
    assert some is not None
    assert 0.25 <= some.low <= 5 / 18 <= some.high <= 0.5
    assert geometric_mean([1.0, 4.0]) == 2.0
    assert geometric_mean([1.0, 0.0]) == 0.0
    assert np.isnan(geometric_mean([]))
