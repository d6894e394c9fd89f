"""What a forward must take at least: the time to read the weights and the past, or the time to compute, whichever is
longer.

Williams et al. 2009, "Roofline: an insightful visual performance model". Real kernels miss it by a factor that hardly
changes with the number of rows, so measured points say how high the curve lies, and the roofline how it bends where
nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHARPNESS = 4.0  # of the bend between memory and arithmetic: the norm that is taken of the two
_LEAST_FACTOR, _MOST_FACTOR = (
    0.5,
    4.0,
)  # how far measured steps may lie from the roofline before it is not trusted with the slope any more
_MOST_ROWS = 512  # filled up to here; from there on a curve's last slope is the arithmetic alone

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Roofline:
    """A model on a machine: bytes of weights that a step reads, arithmetic of a row, bytes of keys and values of a
    token of the past.

    `bytes_per_s` and `flops_per_s` are what the machine reaches in a copy and in a matrix product.
    """

    step_bytes: float
    row_flops: float
    kv_bytes_per_token: float
    bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        if min(self.step_bytes, self.row_flops, self.bytes_per_s, self.flops_per_s) <= 0 or self.kv_bytes_per_token < 0:
            raise ValueError("bytes, arithmetic and speeds must be positive")

    def seconds(self, rows: float, past_tokens: float = 0.0) -> float:
        """A forward over `rows` rows of requests that hold `past_tokens` together; a request's past is read once for
        all its rows.
        """
        memory = (self.step_bytes + past_tokens * self.kv_bytes_per_token) / self.bytes_per_s
        compute = rows * self.row_flops / self.flops_per_s
        longer = max(memory, compute)
        return float(longer * ((memory / longer) ** _SHARPNESS + (compute / longer) ** _SHARPNESS) ** (1 / _SHARPNESS))

    def past_s(self, past_tokens: float) -> float:
        """What reading so many tokens of the past takes."""
        return past_tokens * self.kv_bytes_per_token / self.bytes_per_s

    def fill(self, points: Sequence[tuple[int, float]]) -> Points:
        """Measured `points` (rows ascending, seconds) with points between and beyond them; what was measured stays as
        it is.

        Between two points the curve bends as the roofline does. Beyond the last it goes on as the roofline does, times
        the factor by which the last point lies off it, which is bounded: where calls rather than rows take the time,
        that factor says nothing. Measured seconds that rise give a curve that rises.
        """
        assert points
        last_rows, last_s = points[-1]
        factor = min(max(last_s / self.seconds(last_rows), _LEAST_FACTOR), _MOST_FACTOR)
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
    """Rows from 1 on, further apart as they grow."""
    rows = [1]
    while rows[-1] < _MOST_ROWS:
        rows.append(rows[-1] + max(1, rows[-1] // 8))
    return rows
