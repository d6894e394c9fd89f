"""Do two sets of answers come from one distribution? Bins of texts, and a test of their counts without approximation.

Under that hypothesis an answer might as well have come from the other side, so the labels can be exchanged: the test
compares how far the counts of the two sides lie apart with how far they do after random exchanges (a permutation test;
Lehmann and Romano, Testing Statistical Hypotheses, 2005, section 15.2). Whole answers are exchanged, so tokens of one
answer may depend on each other, and bins may be made from all answers together. Exchanges stop early where the
hypothesis is plainly in no danger (Besag and Clifford, Sequential Monte Carlo p-values, 1991): the p-value is valid for
any number of answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.engine.shadow.tails import noncentrality
from foretoken.measure.stats import Array

POWER = 0.99
_EXCEEDED = 20  # exchanges that lie further apart, after which there is no danger
_RESOLUTION = 3  # exchanges for each one that the level allows to lie further apart
_AT_ONCE = 500


@dataclass(frozen=True)
class TwoSampleTest:
    """The test fails where `p_value` is below `level`.

    `num_answers` are those of one side. `smallest` is the total variation between the two sides' bins that it misses
    with probability 0.01 at most; infinite where there is nothing to tell.
    """

    num_answers: int
    num_bins: int
    statistic: float
    p_value: float
    level: float
    smallest: float

    @property
    def passed(self) -> bool:
        """Whether the answers are consistent with one distribution."""
        return self.p_value >= self.level


def answers_for(effect: float, num_bins: int, level: float) -> int:
    """Answers of each side with which a total variation of `effect` between `num_bins` bins is found with probability
    0.99.

    With n answers a side the statistic's noncentrality is at least 2 n effect^2 (by Cauchy-Schwarz).
    """
    return math.ceil(noncentrality(max(1, num_bins - 1), level, POWER) / (2 * effect**2))


def beginnings(texts: Sequence[str], num_bins: int) -> NDArray[np.int64]:
    """The bin of each text [n], by how it begins: ranges of about as many texts each in the order of the alphabet;
    equal texts are in one bin.
    """
    counts = Counter(texts)
    place: dict[str, int] = {}
    number, filled = 0, 0
    for text in sorted(counts):
        place[text] = number
        filled += counts[text]
        if filled * num_bins >= len(texts) * (number + 1):
            number += 1
    return np.array([place[text] for text in texts], dtype=np.int64)


def counted(answers: Sequence[Sequence[Hashable]], num_bins: int) -> Array:
    """How often each answer holds the commonest things [n, bins], all others in the last bin."""
    common = Counter(thing for answer in answers for thing in answer).most_common(num_bins - 1)
    place = {thing: number for number, (thing, _) in enumerate(common)}
    found = np.zeros((len(answers), len(place) + 1))
    for row, answer in zip(found, answers, strict=True):
        for thing in answer:
            row[place.get(thing, len(place))] += 1
    return found


def two_sample_test(strata: Sequence[tuple[Array, Array]], level: float) -> TwoSampleTest:
    """Test the counts of A's and B's answers, [n, bins] each, in each stratum; answers are exchanged within one only.

    The same counts give the same p-value: the exchanges are drawn from a fixed seed.
    """
    assert all(a.shape == b.shape for a, b in strata)
    pooled = [np.concatenate([a, b]) for a, b in strata]
    totals = np.concatenate([counts.sum(axis=0) for counts in pooled])
    weights = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    observed = float(np.concatenate([(a - b).sum(axis=0) for a, b in strata]) ** 2 @ weights)
    num_answers, num_counted = sum(len(a) for a, _ in strata), totals.sum() / 2
    num_bins = int((totals > 0).sum())
    if num_bins <= len(strata):
        return TwoSampleTest(num_answers, num_bins, observed, 1.0, level, math.inf)
    generator = np.random.default_rng(num_answers)
    most = math.ceil(_RESOLUTION / level)
    drawn: list[Array] = []
    num_drawn, num_above = 0, 0
    p_value = None
    while p_value is None:
        values = _exchanged(pooled, weights, generator, min(_AT_ONCE, most - num_drawn))
        drawn.append(values)
        above = np.cumsum(values >= observed * (1 - 1e-9)) + num_above
        if above[-1] >= _EXCEEDED:
            p_value = _EXCEEDED / (num_drawn + 1 + int(np.argmax(above >= _EXCEEDED)))
        num_drawn, num_above = num_drawn + len(values), int(above[-1])
        if p_value is None and num_drawn >= most:
            p_value = (1 + num_above) / (1 + num_drawn)
    smallest = _smallest(np.concatenate(drawn), float(num_counted), level)
    return TwoSampleTest(num_answers, num_bins, observed, p_value, level, smallest)


def _exchanged(pooled: Sequence[Array], weights: Array, generator: np.random.Generator, count: int) -> Array:
    """The statistic [count] after random exchanges within each stratum."""
    apart = []
    for counts in pooled:
        signs = np.tile(np.repeat([1.0, -1.0], len(counts) // 2), (count, 1))
        apart.append(generator.permuted(signs, axis=1) @ counts)
    found: Array = np.concatenate(apart, axis=1) ** 2 @ weights
    return found


def _smallest(drawn: Array, num_counted: float, level: float) -> float:
    """The total variation that the test finds with probability `POWER`, `num_counted` things counted on each side.

    The statistic is taken for a multiple of chi-square with the moments that it has under exchanges.
    """
    mean, variance = float(drawn.mean()), float(drawn.var())
    if mean <= 0 or variance <= 0:
        return math.inf
    scale, freedom = variance / (2 * mean), max(1, round(2 * mean**2 / variance))
    return math.sqrt(scale * noncentrality(freedom, level, POWER) / (2 * num_counted))
