"""Which rows go to which expert, as Triton kernels: scores of all experts, the best of each row, and places in the
order of their experts. A place is one choice of one row; `experts_triton` multiplies them.

Tiles of places with one expert are as many as any choice may need; those that a choice does not need have no place. So
shapes follow from the number of rows alone. Scores are float32, and a row's do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.experts_work import TILE_FIELDS, tile_bound

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_PLACES = (128, 1024)  # that are read at once to group them, few and many
_SCORE_NUMBERS = 8192  # of the router that a program holds
_SCORE_ROWS = 32  # of a program at most, for which it reads its part of the router once
_LOWEST = tl.constexpr(-3.0e38)  # that of an expert, so that it comes before no expert
# One kernel serves all numbers of rows: Triton would compile others for multiples of 16.
_ROWS, _TILES = ("num_rows", "rows_each"), ("num_places", "num_tiles")


@triton.jit(do_not_specialize=_ROWS)
def _score(
    x,
    weight,
    bias,
    out,
    num_rows,
    size,
    num_scores,
    row_stride,
    rows_each,
    SCORES: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program per part of the rows and part of the scores; a row at a time, so that its sum is always the same."""
    score, dim = tl.program_id(1) * SCORES + tl.arange(0, SCORES), tl.arange(0, DIMS)
    real, real_dim = score < num_scores, dim < size
    own = tl.load(weight + score[:, None] * size + dim[None, :], mask=real[:, None] & real_dim[None, :], other=0.0)
    own = own.to(tl.float32)
    first = tl.program_id(0) * rows_each
    for turn in range(tl.minimum(rows_each, num_rows - first)):
        row = (first + turn).to(tl.int64)
        given = tl.load(x + row * row_stride + dim, mask=real_dim, other=0.0).to(tl.float32)
        total = tl.sum(own * given[None, :], 1)
        if HAS_BIAS:
            total += tl.load(bias + score, mask=real, other=0.0).to(tl.float32)
        tl.store(out + row * num_scores + score, total, mask=real)


@triton.jit
def _choose(
    scores,
    chosen,
    weights,
    num_experts,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    NORMALISES: tl.constexpr,
):
    """One program per row: its best experts, of equal ones the first, and their weights. A row whose scores are no
    numbers, or infinite, goes to none, and its weights are no numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    score = tl.load(scores + row * num_experts + expert, mask=expert < num_experts, other=float("-inf"))
    top = tl.max(score, 0)
    total = tl.sum(tl.exp(score - top), 0)
    left = tl.where(expert < num_experts, tl.maximum(score, _LOWEST), float("-inf"))
    found, kept = tl.zeros([SLOTS], tl.int32), tl.full([SLOTS], 0.0, tl.float32)
    for turn in range(ACTIVE):
        best = tl.argmax(left, 0)
        weight = tl.exp(tl.sum(tl.where(expert == best, score, 0.0), 0) - top)
        found = tl.where(slot == turn, best, found)
        kept = tl.where(slot == turn, weight, kept)
        left = tl.where(expert == best, float("-inf"), left)
    found = tl.where(total == total, found, num_experts)
    if NORMALISES:
        total = tl.sum(kept, 0)
    tl.store(chosen + row * ACTIVE + slot, found, mask=slot < ACTIVE)
    tl.store(weights + row * ACTIVE + slot, kept / total, mask=slot < ACTIVE)


@triton.jit(do_not_specialize=_TILES)
def _group(
    chosen,
    places,
    tiles,
    num_places,
    num_tiles,
    EXPERTS: tl.constexpr,
    LINES: tl.constexpr,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program per expert: its places behind those of the experts before, and its tiles behind theirs. The last one
    has the tiles that are left over.
    """
    expert = tl.program_id(0)
    number = tl.arange(0, EXPERTS)  # one more than experts at least, which counts what is no place
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_places, PLACES):
        place = first + tl.arange(0, PLACES)
        counts += tl.histogram(tl.load(chosen + place, mask=place < num_places, other=EXPERTS - 1), EXPERTS)
    begin = tl.sum(tl.where(number < expert, counts, 0), 0)
    count = tl.sum(tl.where(number == expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(number < expert, (counts + LINES - 1) // LINES, 0), 0)

    written = begin
    for first in range(0, num_places, PLACES):
        place = first + tl.arange(0, PLACES)
        own = tl.load(chosen + place, mask=place < num_places, other=EXPERTS - 1) == expert
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(places + written + rank - 1, place, mask=own)
        written += tl.sum(own.to(tl.int32), 0)

    last = tl.where(expert == tl.num_programs(0) - 1, num_tiles, first_tile + (count + LINES - 1) // LINES)
    for first in range(first_tile, last, TILES):
        tile = first + tl.arange(0, TILES)
        at, done = tiles + tile * _TILE_FIELDS, (tile - first_tile) * LINES
        real = tile < last
        tl.store(at, expert + tl.zeros([TILES], tl.int32), mask=real)
        tl.store(at + 1, begin + done, mask=real)
        tl.store(at + 2, tl.maximum(tl.minimum(count - done, LINES), 0), mask=real)


@dataclass(frozen=True)
class ExpertTiling:
    """How products are cut; no bit of a result depends on it."""

    lines: int  # places of a tile
    outputs: int = 32
    channels: int = 64
    stages: int = 4
    warps: int = 4


def tiling_of(num_places: int, num_experts: int, itemsize: int) -> ExpertTiling:
    """The tiling for so many places, which is fixed for a number of rows; not tuned on any device."""
    mean = num_places // num_experts
    lines = 16 if mean <= 16 else 32 if mean <= 32 else 64
    return ExpertTiling(lines, stages=4 if itemsize == 2 else 2)


@dataclass(frozen=True)
class ExpertPlaces:
    """Places in the order of their experts, [P], and tiles of them, [n * TILE_FIELDS]; None: all have one expert."""

    places: Tensor | None
    tiles: Tensor | None
    num_places: int
    num_tiles: int
    tiling: ExpertTiling
    per_row: int  # places of a row


def scores(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The products of `x` [T, D] with `weight` [E, D] in float32, plus `bias` [E]: [T, E]."""
    num_rows, size = x.shape
    out = torch.empty(num_rows, len(weight), dtype=torch.float32, device=x.device)
    dims = triton.next_power_of_2(size)
    each = max(1, _SCORE_NUMBERS // dims)
    rows_each = triton.cdiv(num_rows, max(1, triton.cdiv(num_rows, _SCORE_ROWS)))
    assert weight.is_contiguous()
    _score[triton.cdiv(num_rows, rows_each), triton.cdiv(len(weight), each)](
        *(x, weight, weight if bias is None else bias, out),
        *(num_rows, size, len(weight), x.stride(0), rows_each),
        SCORES=each,
        DIMS=dims,
        HAS_BIAS=bias is not None,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out


def choose(scores: Tensor, num_active: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """See `Experts.route`: the experts of each row, [T, A] int32, and their weights, [T, A] float32. A row that is no
    number goes to the expert E, which there is not, times no number.
    """
    num_rows, num_experts = scores.shape
    chosen = torch.empty(num_rows, num_active, dtype=torch.int32, device=scores.device)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32, device=scores.device)
    _choose[(num_rows,)](
        *(scores, chosen, weights, num_experts),
        EXPERTS=triton.next_power_of_2(num_experts),
        ACTIVE=num_active,
        SLOTS=triton.next_power_of_2(num_active),
        NORMALISES=normalises,
        num_warps=1 if num_experts <= 256 else 4,
        enable_fp_fusion=False,
    )
    return chosen, weights


def grouped(chosen: Tensor, num_experts: int, itemsize: int) -> ExpertPlaces:
    """The places of `chosen` [T, A] by expert, for weights of `itemsize` bytes; those of no expert are left out."""
    num_places = chosen.numel()
    tiling = tiling_of(num_places, num_experts, itemsize)
    num_tiles = tile_bound(num_places, num_experts, tiling.lines)
    places = torch.empty(num_places, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(num_tiles * TILE_FIELDS, dtype=torch.int32, device=chosen.device)
    _group[(num_experts,)](
        *(chosen, places, tiles, num_places, num_tiles),
        EXPERTS=triton.next_power_of_2(num_experts + 1),
        LINES=tiling.lines,
        PLACES=_PLACES[num_places > _PLACES[0]],
        TILES=32,
    )
    return ExpertPlaces(places, tiles, num_places, num_tiles, tiling, chosen.shape[1])


def every_row(num_rows: int, itemsize: int) -> ExpertPlaces:
    """One place for each row, all with the only expert."""
    tiling = tiling_of(num_rows, 1, itemsize)
    return ExpertPlaces(None, None, num_rows, triton.cdiv(num_rows, tiling.lines), tiling, 1)
