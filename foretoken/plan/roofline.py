"""Lower bound of a forward: the time to read weights and cache, or the time to compute, whichever is longer.

Williams et al. 2009, "Roofline: an insightful visual performance model". Real kernels miss it by a factor that hardly
changes with the number of rows, so measured points give the height of the curve, and the roofline its shape between
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHARPNESS = 4.0  # exponent of the norm that joins memory and compute
_MIN_FACTOR, _MAX_FACTOR = (
    0.5,
    4.0,
)  # limits of the ratio of measured steps to the roofline that is used for extrapolation
_MAX_ROWS = 512  # points up to here; beyond, the slope is that of compute

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Roofline:
    """A model on a machine: bytes of weights per step, operations per row, bytes of keys and values per cached token.

    `bytes_per_s` and `flops_per_s` are measured in a copy and in a matrix product. `step_bytes` is what one row reads.
    Of a mixture of experts, which take `expert_bytes` in all, one row reads `expert_share`, and more rows read more.
    """

    step_bytes: float
    row_flops: float
    kv_bytes_per_token: float
    bytes_per_s: float
    flops_per_s: float
    expert_bytes: float = 0.0
    expert_share: float = 1.0

    def __post_init__(self) -> None:
        if min(self.step_bytes, self.row_flops, self.bytes_per_s, self.flops_per_s) <= 0 or self.kv_bytes_per_token < 0:
            raise ValueError("bytes, arithmetic and speeds must be positive")
        if self.expert_bytes < 0 or not 0 < self.expert_share <= 1:
            raise ValueError("the bytes of experts must not be negative, and a row's share of them lies in (0, 1]")

    def seconds(self, rows: float, past_tokens: float = 0.0) -> float:
        """Seconds of a forward over `rows` rows of requests with `past_tokens` cached tokens in total; the cache of a
        request is read once for all its rows.
        """
        memory = (self.read_bytes(rows) + past_tokens * self.kv_bytes_per_token) / self.bytes_per_s
        compute = rows * self.row_flops / self.flops_per_s
        longer = max(memory, compute)
        return float(longer * ((memory / longer) ** _SHARPNESS + (compute / longer) ** _SHARPNESS) ** (1 / _SHARPNESS))

    def read_bytes(self, rows: float) -> float:
        """Weights that a forward over `rows` rows reads: each expert that a row goes to once for all its rows.

        An expert is read with the probability 1 - (1 - share) ** rows, if rows go to experts independently and no
        expert is preferred. Rows of one text agree more, and measured points take precedence.
        """
        others = 1.0 - self.expert_share
        return self.step_bytes + self.expert_bytes * float(others - others ** max(rows, 1))

    def past_s(self, past_tokens: float) -> float:
        """Seconds for reading the keys and values of cached tokens."""
        return past_tokens * self.kv_bytes_per_token / self.bytes_per_s

    def fill(self, points: Sequence[tuple[int, float]]) -> Points:
        """Measured `points` (rows ascending, seconds) with points between and beyond them; measured points are
        unchanged.

        Between two points the curve follows the roofline. Beyond the last it is the roofline times the ratio of the
        last point to it, which is clipped: where calls dominate instead of rows, the ratio is meaningless. Increasing
        points give an increasing curve.
        """
        assert points
        last_rows, last_s = points[-1]
        factor = min(max(last_s / self.seconds(last_rows), _MIN_FACTOR), _MAX_FACTOR)
        filled = dict(points)
        for rows in _grid():
            place = next((place for place, (known, _) in enumerate(points) if known >= rows), len(points))
            if place == len(points):
                filled[rows] = last_s + factor * (self.seconds(rows) - self.seconds(last_rows))
            elif place:
                (low, below), (high, above) = points[place - 1 : place + 1]
                rise = self.seconds(high) - self.seconds(low)
                share = (self.seconds(rows) - self.seconds(low)) / rise if rise > 0 else (rows - low) / (high - low)
                filled.setdefault(rows, below + share * (above - below))
        return tuple(sorted(filled.items()))


def _grid() -> list[int]:
    """Row counts from 1 on, with growing distances."""
    rows = [1]
    while rows[-1] < _MAX_ROWS:
        rows.append(rows[-1] + max(1, rows[-1] // 8))
    return rows
