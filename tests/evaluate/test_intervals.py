"""Intervals over prompts: quantiles, coverage, pairs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from foretoken.evaluate.intervals import expected_interval, loss_interval, ratio, ratio_interval, student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 99])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.9975])
def test_quantiles_are_students(probability: float, freedom: int) -> None:
    expected = stats.t.ppf(probability, freedom)
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-4 if freedom > 1 else 1e-2)


def draws(generator: np.random.Generator, count: int, rate: float = 0.6) -> np.ndarray:
    """Prompts with 40 drafted tokens each and a rate of their own, Beta about `rate`."""
    own = generator.beta(6 * rate, 6 * (1 - rate), size=count)
    return np.stack([generator.binomial(40, own), np.full(count, 40)], axis=1).astype(float)


def test_the_interval_covers_and_an_interval_on_tokens_would_not() -> None:
    """400 samples of 10 prompts. Binomial(400, 0.95) is below 368 with probability 0.005; percentiles that are not
    expanded cover 364 of these samples.
    """
    generator = np.random.default_rng(7)
    hits, token_hits = 0, 0
    for _ in range(400):
        counts = draws(generator, 10)
        found = ratio_interval(counts)
        assert found is not None
        hits += found.low <= 0.6 <= found.high
        rate = ratio(counts)
        assert rate is not None
        token_hits += abs(rate - 0.6) <= 1.96 * (rate * (1 - rate) / 400) ** 0.5
    assert hits >= 368
    assert token_hits < 250


def test_pairs_make_the_interval_of_a_difference_narrow() -> None:
    before = draws(np.random.default_rng(3), 12)
    after = before - [2, 0]  # each prompt lost 2 of 40
    paired, unpaired = (loss_interval(before, after, paired, tail=0.025) for paired in (True, False))
    assert paired is not None
    assert unpaired is not None
    assert (paired.low, paired.high) == (pytest.approx(0.05), pytest.approx(0.05))
    assert unpaired.low < 0 < 0.1 < unpaired.high


def test_what_is_expected_of_several_positions() -> None:
    """With one position it is the rate; prompts that are alike leave nothing open."""
    counts = draws(np.random.default_rng(5), 8)
    assert expected_interval([counts]) == ratio_interval(counts)
    alike = [np.array([[8.0, 10.0]] * 6), np.array([[4.0, 8.0]] * 6)]
    found = expected_interval(alike)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))
    assert expected_interval([counts[:1]]) is None


def test_what_has_no_ratio() -> None:
    assert ratio(np.zeros((3, 2))) is None
    assert ratio_interval(np.array([[1.0, 2.0]])) is None
    assert ratio_interval(np.array([[1.0, 2.0], [0.0, 0.0]])) is None
    assert loss_interval(np.ones((1, 2)), np.ones((1, 2)), True, 0.025) is None
    assert loss_interval(np.ones((1, 2)), np.ones((4, 2)), False, 0.025) is None
    some = ratio_interval(np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 4.0]]))
    assert some is not None
    assert 0.25 <= some.low <= 1 / 3 <= some.high <= 0.5
