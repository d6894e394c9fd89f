"""Intervals of acceptance rates by a bootstrap over prompts.

The tokens of one answer are not independent: an answer that loops is accepted whole. An interval on token counts
(Wilson) would take them as independent and come out several times too narrow. So whole prompts are drawn again with
replacement, and every rate is a ratio of sums over the drawn prompts. The percentiles are expanded for few prompts, as
in Hesterberg, What Teachers Should Know about the Bootstrap (2015), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_NUM_SAMPLES = 10_000
_SEED = 20_150_000  # the same draws in every run: a result is a function of its counts

Counts = NDArray[np.float64]  # [n, 2]: numerator and denominator of each prompt


@dataclass(frozen=True)
class Interval:
    """The ends of an interval."""

    low: float
    high: float


def ratio(counts: Counts) -> float | None:
    """Sum of the numerators over that of the denominators; None if that is 0."""
    above, below = counts.sum(axis=0).tolist()
    return above / below if below else None


def ratio_interval(counts: Counts, tail: float = (1 - CONFIDENCE) / 2) -> Interval | None:
    """The interval of a ratio, `tail` outside at either end; None for fewer than two prompts with a denominator."""
    counts = _used(counts)
    if len(counts) < 2:
        return None
    return _percentiles(_ratios(counts, _weights(len(counts))), len(counts), tail)


def expected_interval(positions: Sequence[Counts]) -> Interval | None:
    """The interval of the expected number of accepted tokens of a draft with these positions (`expected_accepted`).

    `positions[k]` holds (passed, reached) of every prompt, all in the same order; None for fewer than two prompts.
    """
    num_prompts = int((positions[0][:, 1] > 0).sum())
    if num_prompts < 2:
        return None
    weights = _weights(len(positions[0]))
    chances = np.stack([_ratios(counts, weights) for counts in positions])
    return _percentiles(np.cumprod(chances, axis=0).sum(axis=0), num_prompts, (1 - CONFIDENCE) / 2)


def expected_accepted(chances: Sequence[float]) -> float:
    """E[accepted] of a draft with one position for each chance: the sum of their products."""
    return float(np.cumprod(chances).sum())


def loss_interval(before: Counts, after: Counts, paired: bool, tail: float) -> Interval | None:
    """The interval of ratio(before) - ratio(after); None for fewer than two prompts with a denominator.

    With `paired` row i of both is the same prompt, and both are drawn together.
    """
    if paired:
        kept = (before[:, 1] > 0) | (after[:, 1] > 0)
        before, after = before[kept], after[kept]
        if len(before) < 2:
            return None
        weights = _weights(len(before))
        return _percentiles(_ratios(before, weights) - _ratios(after, weights), len(before), tail)
    before, after = _used(before), _used(after)
    num_prompts = min(len(before), len(after))
    if num_prompts < 2:
        return None
    difference = _ratios(before, _weights(len(before))) - _ratios(after, _weights(len(after), stream=1))
    return _percentiles(difference, num_prompts, tail)


def _used(counts: Counts) -> Counts:
    return counts[counts[:, 1] > 0]


@lru_cache(maxsize=4)
def _weights(num_prompts: int, stream: int = 0) -> NDArray[np.float64]:
    """How often each prompt is drawn, `[_NUM_SAMPLES, num_prompts]`."""
    generator = np.random.default_rng([_SEED, stream])
    return generator.multinomial(num_prompts, [1 / num_prompts] * num_prompts, size=_NUM_SAMPLES).astype(np.float64)


def _ratios(counts: Counts, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = weights @ counts
    ratios = np.full(len(sums), np.nan)
    np.divide(sums[:, 0], sums[:, 1], out=ratios, where=sums[:, 1] > 0)
    return ratios


def _percentiles(values: NDArray[np.float64], num_prompts: int, tail: float) -> Interval | None:
    values = values[~np.isnan(values)]  # a draw of prompts in which nothing was drafted has no ratio
    if not len(values):
        return None
    tail = expanded_tail(num_prompts, tail)
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


@lru_cache
def expanded_tail(num_prompts: int, tail: float) -> float:
    """The share of a bootstrap distribution to leave out at either end, so that about `tail` of the sampling
    distribution is.

    A bootstrap of n prompts is too narrow by sqrt((n - 1) / n), and takes a normal quantile for one of Student's t.
    """
    factor = (num_prompts / (num_prompts - 1)) ** 0.5
    return NormalDist().cdf(-factor * student_quantile(1 - tail, num_prompts - 1))


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for a probability above 0.5, by bisection of its distribution function.

    The density is integrated over t = sqrt(freedom) * tan(angle), where it is cos(angle) ** (freedom - 1).
    """
    angles = np.linspace(0.0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    total = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp((probability - 0.5) * 2 * total[-1], total, angles)
    return float(np.sqrt(freedom) * np.tan(min(angle, angles[-2])))
