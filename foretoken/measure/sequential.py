"""What holds however often one looks at it: intervals of a mean, by which one may stop measuring, and the evidence that
a figure measured once a day has fallen (`drop_evidence`).

An interval of fixed size is right at one number of measurements, chosen before; who looks after each and stops at a
pleasant one is wrong far more often than one time in twenty. A confidence sequence holds at all numbers together. This
is the asymptotic one of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform central limit theory and
asymptotic confidence sequences, 2024, arXiv 2103.06476, theorem 2.2), of means of independent blocks:

    mean +- sd * sqrt(2 (n r + 1) / (n^2 r) * log(sqrt(n r + 1) / alpha))

where r sets the number of blocks at which it is narrowest (their appendix B.2). It is asymptotic: with few blocks the
standard deviation is itself a sample. So sd is widened as Student's t is over the normal distribution, and nothing is
said of fewer than `MIN_BLOCKS` blocks. `proof/test_ab_rates.py` measures the rest: at most 5 % of runs without a
difference ever find one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.measure.stats import CONFIDENCE, Array, Interval, student_quantile

ALPHA = 1 - CONFIDENCE
MIN_BLOCKS = 8
_NARROW_AT = 64  # blocks, at which the sequence is narrowest: 256 requests in blocks of four pairs
_R = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / _NARROW_AT
_MAX_BLOCKS = 1 << 20

Verdict = Literal["faster", "equivalent", "slower", "go on"]
MIN_DAYS = 7  # before the first bet: a week has its own pattern
# Of each bet: the probability of its event, and the share of the money. Rarer events are likelier than that on skewed
# days.
_CHANCES, _STAKES = np.array([1.0, 0.2, 0.1]), np.array([0.0, 0.3, 0.4])
_ROUNDING = 1e-12  # days that are all equal are not below their mean
_JUMPING = 0.02  # of the money, which is divided anew between the bets every day


def widths(deviations: Array, num_blocks: Array) -> Array:
    """Half the width [...] of the sequence after `num_blocks` [...] blocks of at least 2, whose means have the standard
    deviations `deviations` [...].
    """
    scaled = num_blocks * _R + 1
    normal = NormalDist().inv_cdf(1 - ALPHA / 2)
    wider = np.vectorize(lambda n: student_quantile(1 - ALPHA / 2, int(n) - 1) / normal, otypes=[np.float64])
    found: Array = (
        deviations * wider(num_blocks) * np.sqrt(2 * scaled / (num_blocks**2 * _R) * np.log(np.sqrt(scaled) / ALPHA))
    )
    return found


def confidence_sequence(means: Sequence[float]) -> Interval | None:
    """Where the mean of blocks lies after these; None for fewer than `MIN_BLOCKS`.

    `means` are the mean of each block so far, in their order; the probability that any of the intervals of a run misses
    is about `ALPHA` in all.
    """
    count = len(means)
    if count < MIN_BLOCKS:
        return None
    values = np.array(means, dtype=np.float64)
    half = float(widths(values.std(ddof=1), np.array(float(count))))
    return Interval(float(values.mean()) - half, float(values.mean()) + half)


def judge(found: Interval | None, margin: float) -> Verdict:
    """What an interval of the mean log-ratio (above 0: faster) says, with an equivalence margin as a log-ratio.

    "equivalent": the whole interval is within the margin, on one side of 0 or not; "go on": it is too wide for a word.
    """
    if found is None:
        return "go on"
    if -margin < found.low and found.high < margin:
        return "equivalent"
    if found.low > 0:
        return "faster"
    return "slower" if found.high < 0 else "go on"


def blocks_to_decide(means: Sequence[float], margin: float) -> int | None:
    """About how many blocks in all decide, if they go on as `means` did; None where too few are known, or no number
    that is worth waiting for does.
    """
    if len(means) < MIN_BLOCKS:
        return None
    values = np.array(means, dtype=np.float64)
    mean = abs(float(values.mean()))
    enough = max(mean, margin - mean)  # narrower than this, 0 or what is beyond the margin is ruled out
    count = len(means)
    while count <= _MAX_BLOCKS:
        if float(widths(values.std(ddof=1), np.array(float(count)))) < enough:
            return count
        count += max(1, count // 16)
    return None


def drop_evidence(values: ArrayLike) -> Array:
    """What bets on a drop have made of 1 after each of the values [..., days]: [..., days]. 1/alpha or more is a drop,
    at a false-alarm rate of alpha for all days together.

    Of independent normal days with one mean,

        (day - mean of the n before) / (standard deviation of those * sqrt(1 + 1 / n))

    follows Student's t with n - 1 degrees of freedom, and is independent of those before (recursive residuals: Brown,
    Durbin and Evans, 1975). Money is bet every day on a value below a quantile of that distribution. What it grows to
    is a martingale that starts at 1, so the probability that it ever reaches 1/alpha is at most alpha (Ville, 1939).
    What a day can win is bounded: one bad day raises no alarm, whatever its value. A part of the money moves between
    the bets every day, as a drop may come after any number of days. `proof/test_drop_rates.py` measures the rate, also
    for days that are not normal.
    """
    days = np.asarray(values, dtype=np.float64)
    money = np.full((*days.shape[:-1], len(_CHANCES)), 1 / len(_CHANCES))
    found = np.ones_like(days)
    mean, squares = np.zeros(days.shape[:-1]), np.zeros(days.shape[:-1])
    for count in range(days.shape[-1]):
        excess = days[..., count] - mean
        if count >= MIN_DAYS:
            won = _is_low(excess, np.sqrt(squares / (count - 1) * (1 + 1 / count)), count - 1)
            shared = _JUMPING * money.sum(axis=-1, keepdims=True) / len(_CHANCES)
            money = ((1 - _JUMPING) * money + shared) * (1 - _STAKES + won * _STAKES / _CHANCES)
            found[..., count] = money.sum(axis=-1)
        mean = mean + excess / (count + 1)  # Welford's update
        squares = squares + excess * (days[..., count] - mean)
    return found


def _is_low(excess: Array, width: Array, freedom: int) -> NDArray[np.bool_]:
    """Of each bet whether its event came: `excess` [...] over the mean is below its quantile of `width` [...]."""
    limits = np.array([-student_quantile(1 - chance, freedom) if chance < 1 else 0.0 for chance in _CHANCES])
    found: NDArray[np.bool_] = (excess < -_ROUNDING)[..., None] & (excess[..., None] < limits * width[..., None])
    return found
