"""The ratio of two settings that answered the same prompts, with a bootstrap interval over prompts.

Efron 1979; the percentile interval, each prompt drawn with its answers under both settings (a paired bootstrap). The
interval tells how far the ratio depends on the choice of prompts. With fewer than ten prompts it is too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 2000
COVERAGE = 0.95
_SEED = 0

# (amount, cost) by (prompt, repeat), such as tokens and seconds.
Measured = Mapping[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True)
class PairedRatio:
    """One setting's rate over another's, and its interval; None with a single prompt. `by_prompt` holds each prompt's
    own ratio.
    """

    ratio: float
    low: float | None
    high: float | None
    by_prompt: Mapping[int, float]


def paired_ratio(own: Measured, base: Measured, seed: int = _SEED) -> PairedRatio | None:
    """The rate of `own` over that of `base`, on the (prompt, repeat) pairs that both have; None where there is none.

    A rate is the sum of amounts over the sum of costs of a repeat, and the median over repeats. The same numbers and
    `seed` give the same interval.
    """
    common = own.keys() & base.keys()
    prompts = sorted({prompt for prompt, _ in common})
    repeats = sorted({repeat for _, repeat in common})
    ours, theirs = (_table(measured, prompts, repeats, common) for measured in (own, base))
    ratio = _ratios(ours, theirs, np.ones((1, len(prompts))))
    if not ratio.size:
        return None
    low: float | None = None
    high: float | None = None
    if len(prompts) > 1:
        drawn = np.random.default_rng(seed).integers(len(prompts), size=(NUM_DRAWS, len(prompts)))
        times = np.stack([(drawn == place).sum(axis=1) for place in range(len(prompts))], axis=1)  # [draws, P]
        tail = 100 * (1 - COVERAGE) / 2
        low, high = (float(value) for value in np.percentile(_ratios(ours, theirs, times), [tail, 100 - tail]))
    alone = (_ratios(ours, theirs, row[None]) for row in np.eye(len(prompts)))
    by_prompt = {prompt: float(own[0]) for prompt, own in zip(prompts, alone, strict=True) if own.size}
    return PairedRatio(float(ratio[0]), low, high, by_prompt)


def _table(
    measured: Measured, prompts: list[int], repeats: list[int], common: set[tuple[int, int]]
) -> NDArray[np.float64]:
    """Amounts and costs: [2, repeats, prompts]; zeros where a pair was not measured."""
    rows = [[measured[p, r] if (p, r) in common else (0.0, 0.0) for p in prompts] for r in repeats]
    return np.moveaxis(np.array(rows, dtype=np.float64).reshape(len(repeats), len(prompts), 2), 2, 0)


def _ratios(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], times: NDArray[np.float64] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """The ratio for each row of `times` [draws, P], how often each prompt counts; draws without a rate are left out."""
    rates = [_rates(table, times) for table in (ours, theirs)]
    known = [~np.isnan(rate).all(axis=0) for rate in rates]
    both = known[0] & known[1]
    own, base = (np.nanmedian(rate[:, both], axis=0) if both.any() else np.empty(0) for rate in rates)
    return np.asarray(own[base > 0] / base[base > 0])


def _rates(table: NDArray[np.float64], times: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """[repeats, draws]; not a number where a draw has no answer in a repeat."""
    amounts, costs = table[0] @ times.T, table[1] @ times.T
    return np.where(costs > 0, amounts / np.where(costs > 0, costs, 1.0), np.nan)
