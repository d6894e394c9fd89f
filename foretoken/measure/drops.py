"""Has a figure that is measured once a day fallen? A test that may be read every day without raising false alarms.

Of independent normal days with one mean,

    (day - mean of the n before) / (standard deviation of those * sqrt(1 + 1 / n))

follows Student's t with n - 1 degrees of freedom, and is independent of those before (recursive residuals: Brown,
Durbin and Evans, 1975). Money is bet every day on a value below a quantile of that distribution. What it grows to is a
martingale that starts at 1, so the probability that it ever reaches 1/alpha is at most alpha (Ville, 1939). What a day
can win is bounded: one bad day raises no alarm, whatever its value. A part of the money moves between the bets every
day, as a drop may come after any number of days. `proof/test_drop_rates.py` measures the rate, also for days that are
not normal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.measure.stats import Array, student_quantile

MIN_DAYS = 7  # before the first bet: a week has its own pattern
# Of each bet: the probability of its event, and the share of the money. Rarer events are likelier than that on skewed
# days.
_CHANCES, _STAKES = np.array([1.0, 0.2, 0.1]), np.array([0.0, 0.3, 0.4])
_ROUNDING = 1e-12  # days that are all equal are not below their mean
_JUMPING = 0.02  # of the money, which is divided anew between the bets every day


def drop_evidence(values: ArrayLike) -> Array:
    """What bets on a drop have made of 1 after each of the values [..., days]: [..., days]. 1/alpha or more is a drop,
    at a false-alarm rate of alpha for all days together.
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
