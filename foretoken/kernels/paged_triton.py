"""Attention over paged keys and values as a Triton kernel: ragged batches, trees, grouped heads, windows, soft caps and
sinks, in one launch per layer, and a second one where programs share the columns of a text.

A program reads the columns of one part of a text for one tile of query rows: the heads of a key group at some
positions. Scores and sums are float32. Sums over columns run in an order of their own (`paged_work.SPAN_COLUMNS`), and
tiles in which a row sees nothing change no bit of its sum, so that they may be skipped. Sharing long texts among
programs is Flash-Decoding (Dao et al., 2023). A tree comes as distances between its rows, which windows need, in place
of a bias.

`TRITON_INTERPRET=1`, set before this module is imported, runs the kernel on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.paged_work import (
    MERGE_FIELDS,
    SEGMENT_FIELDS,
    SPAN_COLUMNS,
    TILE_FIELDS,
    PagedWork,
    padded,
    tile_columns,
    tile_lines,
)
from foretoken.kernels.row_triton import operand

_SEGMENT_FIELDS = tl.constexpr(SEGMENT_FIELDS)
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_MERGE_FIELDS = tl.constexpr(MERGE_FIELDS)
_NO_WINDOW = 2**30
_LARGEST_EXPONENT = tl.constexpr(80.0)  # tanh is 1 in float32 long before e to this overflows


@triton.jit
def _capped(score, softcap):
    """`softcap * tanh(score / softcap)`."""
    exponent = score * (2.0 / softcap)
    # Not `tl.minimum`, which would make a number of what is none.
    exponent = tl.where(exponent > _LARGEST_EXPONENT, _LARGEST_EXPONENT, exponent)
    return softcap * (1.0 - 2.0 / (tl.exp(exponent) + 1.0))


@triton.jit
def _merge(peak, total, read, other_peak, other_total, other_read):
    """Two softmax sums as one: largest score, sum of weights, weighted values. A sum of nothing changes no bit."""
    top = tl.maximum(peak, other_peak)
    at = tl.where(top == float("-inf"), 0.0, top)
    own, other = tl.exp(peak - at), tl.exp(other_peak - at)
    return top, total * own + other_total * other, read * own[:, None] + other_read * other[:, None]


@triton.jit
def _result(peak, total, read, sinks, head, real, HAS_SINKS: tl.constexpr):
    """Weighted values over the sum of weights, of which the sink of a head takes its share."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        peak, total, read = _merge(
            peak, total, read, sink, tl.full(sink.shape, 1.0, tl.float32), tl.full(read.shape, 0.0, tl.float32)
        )
    return read / tl.where(real, total, 1.0)[:, None]


@triton.jit
def _attend(
    query,
    keys,
    values,
    sinks,
    out,
    part_peaks,
    part_totals,
    part_reads,
    segments,
    tiles,
    blocks,
    positions,
    distances,
    query_row,
    query_head,
    cache_head,
    num_heads,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile of rows, key group and part of the columns."""
    tile, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = segments + tl.load(tiles + tile * _TILE_FIELDS) * _SEGMENT_FIELDS
    past, num_columns, num_rows = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    first_row, first_block, first_distance = tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
    part_spans, first_part_row = tl.load(fields + 6), tl.load(fields + 7)
    if part * part_spans * SPAN >= num_columns:
        return  # the columns of this segment have fewer parts

    line, dim = tl.arange(0, LINES), tl.arange(0, DIMS)
    row = tl.load(tiles + tile * _TILE_FIELDS + 1) + line // PER_GROUP
    head = group * PER_GROUP + line % PER_GROUP
    real = (line < LINES // PER_GROUP * PER_GROUP) & (row < num_rows)
    flat = (first_row + row).to(tl.int64)
    real_dim = dim < HEAD_DIM
    wanted = real[:, None] & real_dim[None, :]
    rows = tl.load(query + (flat * query_row + head * query_head)[:, None] + dim[None, :], mask=wanted, other=0.0)
    rows = rows.to(OPERAND)
    position = tl.load(positions + flat, mask=real, other=0)
    is_tree = first_distance >= 0
    lowest = tl.maximum(tl.min(tl.where(real, position, num_columns)) - window + 1, 0)
    stop = tl.where(is_tree, num_columns, tl.minimum(num_columns, tl.max(position) + 1))

    peak, total = tl.full([LINES], float("-inf"), tl.float32), tl.full([LINES], 0.0, tl.float32)
    read = tl.full([LINES, DIMS], 0.0, tl.float32)
    last_span = tl.minimum((part + 1) * part_spans, (stop + SPAN - 1) // SPAN)
    for span in range(tl.maximum(part * part_spans, lowest // SPAN), last_span):
        span_peak, span_total = tl.full([LINES], float("-inf"), tl.float32), tl.full([LINES], 0.0, tl.float32)
        span_read = tl.full([LINES, DIMS], 0.0, tl.float32)
        begin = tl.maximum(span * SPAN, lowest // COLUMNS * COLUMNS)
        for first in range(begin, tl.minimum((span + 1) * SPAN, stop), COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            held = column < num_columns
            block = tl.load(blocks + first_block + column // BLOCK, mask=held, other=0)
            slot = block.to(tl.int64) * BLOCK + column % BLOCK
            place = group.to(tl.int64) * cache_head + slot[:, None] * HEAD_DIM + dim[None, :]
            there = held[:, None] & real_dim[None, :]
            key = tl.load(keys + place, mask=there, other=0.0)
            score = tl.dot(rows, tl.trans(key.to(OPERAND)), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                score = _capped(score, softcap)
            distance = position[:, None] - column[None, :]
            if HAS_TREES:
                new = column - past
                among = is_tree & (new >= 0) & held
                told = first_distance + row[:, None] * (num_columns - past) + new[None, :]
                told = tl.load(distances + told, mask=real[:, None] & among[None, :], other=-1)
                distance = tl.where(among[None, :], told, distance)
            seen = (distance >= 0) & (distance < window) & held[None, :]
            score = tl.where(seen, score, float("-inf"))
            top = tl.maximum(span_peak, tl.max(score, 1))
            at = tl.where(top == float("-inf"), 0.0, top)
            kept, weight = tl.exp(span_peak - at), tl.exp(score - at[:, None])
            value = tl.load(values + place, mask=there, other=0.0)
            rounded = weight.to(query.dtype.element_ty).to(OPERAND)
            product = tl.dot(rounded, value.to(OPERAND), input_precision="ieee")
            span_read = span_read * kept[:, None] + product
            span_total = span_total * kept + tl.sum(weight, 1)
            span_peak = top
        peak, total, read = _merge(peak, total, read, span_peak, span_total, span_read)

    if part_spans * SPAN >= num_columns:
        read = _result(peak, total, read, sinks, head, real, HAS_SINKS)
        to = (flat * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + to, read.to(out.dtype.element_ty), mask=wanted)
    else:
        line_at = (first_part_row + part * num_rows + row).to(tl.int64) * num_heads + head
        tl.store(part_peaks + line_at, peak, mask=real)
        tl.store(part_totals + line_at, total, mask=real)
        tl.store(part_reads + line_at[:, None] * HEAD_DIM + dim[None, :], read, mask=wanted)


@triton.jit
def _merge_parts(
    sinks,
    out,
    part_peaks,
    part_totals,
    part_reads,
    merged,
    num_heads,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program per row and head whose columns have several parts: their sums in order."""
    fields = merged + tl.program_id(0) * _MERGE_FIELDS
    row, first, step, num_parts = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    one = tl.arange(0, 1)
    head, dim = tl.program_id(1) + one, tl.arange(0, DIMS)
    real, real_dim = one == 0, (dim < HEAD_DIM)[None, :]
    if num_parts == 0:
        return  # padding
    peak, total = tl.full([1], float("-inf"), tl.float32), tl.full([1], 0.0, tl.float32)
    read = tl.full([1, DIMS], 0.0, tl.float32)
    for part in range(num_parts):
        place = (first + part * step).to(tl.int64) * num_heads + head
        part_read = tl.load(part_reads + place[:, None] * HEAD_DIM + dim[None, :], mask=real_dim, other=0.0)
        peak, total, read = _merge(
            peak, total, read, tl.load(part_peaks + place), tl.load(part_totals + place), part_read
        )
    read = _result(peak, total, read, sinks, head, real, HAS_SINKS)
    to = (row.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + to, read.to(out.dtype.element_ty), mask=real_dim)


def sizes_of(num_heads: int, num_groups: int, head_dim: int, itemsize: int, block_size: int) -> dict[str, int]:
    """What a kernel is compiled for beside the switches: `itemsize` of queries, keys and values."""
    per_group = num_heads // num_groups
    return {
        "HEAD_DIM": head_dim,
        "DIMS": padded(head_dim),
        "PER_GROUP": per_group,
        "LINES": tile_lines(per_group, head_dim),
        "COLUMNS": tile_columns(head_dim, itemsize),
        "SPAN": SPAN_COLUMNS,
        "BLOCK": block_size,
    }


def attend(
    work: PagedWork,
    cache: tuple[Tensor, Tensor],
    block_size: int,
    query: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`query` [T, H, K] over keys and values [G, S, K] of the same dtype (float16, bfloat16 or float32) -> [T, H, K].

    `sinks` [H] take part in the softmax; `softcap` 0: none; `window` None: all positions up to a row's own.
    """
    keys, values = cache
    num_heads, head_dim = query.shape[1:]
    assert query.stride(2) == 1
    assert keys.is_contiguous()
    assert values.is_contiguous()
    sizes = sizes_of(num_heads, len(keys), head_dim, query.itemsize, block_size)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    peaks = query.new_empty(work.num_part_rows * num_heads, dtype=torch.float32)
    totals, reads = torch.empty_like(peaks), peaks.new_empty(len(peaks), head_dim)
    shared = (query if sinks is None else sinks, out, peaks, totals, reads)  # without sinks, the first is not read
    with torch.cuda.device_of(query):
        _attend[work.num_tiles, len(keys), work.num_parts](
            *(query, keys, values, *shared),
            *(work.segments, work.tiles, work.blocks, work.positions, work.distances),
            *(query.stride(0), query.stride(1), keys.stride(0), num_heads),
            *(scale, softcap, _NO_WINDOW if window is None else window),
            **sizes,
            HAS_SOFTCAP=softcap != 0.0,
            HAS_SINKS=sinks is not None,
            HAS_TREES=work.has_trees,
            OPERAND=operand(query),
            enable_fp_fusion=False,  # the two kernels, and any version of either, round alike
        )
        if work.num_merged:
            _merge_parts[work.num_merged, num_heads](
                *(*shared, work.merged, num_heads),
                HEAD_DIM=head_dim,
                DIMS=sizes["DIMS"],
                HAS_SINKS=sinks is not None,
                enable_fp_fusion=False,
                num_warps=1,
            )
    return out
