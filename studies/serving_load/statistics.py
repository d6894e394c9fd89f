"""Slopes and quantiles of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between two points: a few outliers do not move it. 0 for fewer than two points."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for place, earlier in enumerate(points)
        for later in points[place + 1 :]
        if later[0] > earlier[0]
    ]
    return median(slopes) if slopes else 0.0


def quantile_of(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan
