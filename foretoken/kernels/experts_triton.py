"""A mixture of experts as Triton kernels: the device finds out which rows go to which expert, and the host never waits.

Six launches a layer: scores of all experts, the best of each row and places in the order of their experts
(`expert_routes_triton`), channels, outputs, and the weighted sum of each row's outputs. A place is one choice of one
row. Tiles of places with one expert are as many as any choice may need; those that a choice does not need end at once.
So shapes follow from the number of rows alone, and a CUDA graph can hold the launches.

A row's result does not depend on the rows beside it: sums run over channels in their order in one accumulator, in tiles
so small that all of them are compiled to the same matrix instruction, each place has an output of its own, and those of
a row are added in the order of its choice. Scores, sums and outputs are float32; channels are rounded once, and so is
the result.

`TRITON_INTERPRET=1`, set before this module is imported, runs the kernels on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.expert_routes_triton import ExpertPlaces, choose, every_row, grouped, scores
from foretoken.kernels.experts_work import TILE_FIELDS, StackedExperts, StackedMixture
from foretoken.kernels.row_triton import logistic, operand

_TILE_FIELDS = tl.constexpr(TILE_FIELDS)
_MIX_CHANNELS = 512  # of a program
# One kernel serves all numbers of rows: Triton would compile others for multiples of 16.
_FREE = ("num_places",)


@triton.jit
def _tile(places, tiles, num_places, LINES: tl.constexpr, IS_ALL: tl.constexpr):
    """The expert of this program's tile, its places, and how many there are; all places in order have one expert where
    `IS_ALL`.
    """
    tile, line = tl.program_id(0), tl.arange(0, LINES)
    if IS_ALL:
        expert, first = tile * 0, tile * LINES
        count = tl.minimum(num_places - first, LINES)
        place = first + line
    else:
        fields = tiles + tile * _TILE_FIELDS
        expert, first, count = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
        place = tl.load(places + first + line, mask=line < count, other=0)
    return expert.to(tl.int64), place.to(tl.int64), count


@triton.jit
def _loaded(matrix, output, channel, size, real, EVEN: tl.constexpr):
    """A tile [OUTPUTS, CHANNELS] of a matrix [N, K]; `real` [OUTPUTS]."""
    there = real[:, None]
    if not EVEN:
        there = there & (channel < size)[None, :]
    return tl.load(matrix + output[:, None] * size + channel[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=_FREE)
def _channels(
    x,
    weight,
    bias,
    out,
    places,
    tiles,
    num_places,
    size,
    num_outputs,
    row_stride,
    per_row,
    limit,
    alpha,
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPS: tl.constexpr,
    IS_ALL: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile and part of an expert's channels: gates and ups of the tile's rows, [P, I]."""
    expert, place, count = _tile(places, tiles, num_places, LINES, IS_ALL)
    if count == 0:
        return
    there = tl.arange(0, LINES) < count
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < num_outputs
    gates = weight + expert * (2 * num_outputs) * size
    ups = gates + num_outputs * size
    rows = x + (place // per_row)[:, None] * row_stride
    gate, up = tl.zeros([OUTPUTS, LINES], tl.float32), tl.zeros([OUTPUTS, LINES], tl.float32)
    for first in tl.range(0, size, CHANNELS, num_stages=STAGES):
        channel = first + tl.arange(0, CHANNELS)
        given = there[:, None]
        if not EVEN:
            given = given & (channel < size)[None, :]
        own = tl.trans(tl.load(rows + channel[None, :], mask=given, other=0.0)).to(OPERAND)  # [CHANNELS, LINES]
        one = _loaded(gates, output, channel, size, real, EVEN).to(OPERAND)
        other = _loaded(ups, output, channel, size, real, EVEN).to(OPERAND)
        gate = tl.dot(one, own, gate, input_precision="ieee")
        up = tl.dot(other, own, up, input_precision="ieee")
    if HAS_BIAS:
        at = bias + expert * (2 * num_outputs) + output
        gate += tl.load(at, mask=real, other=0.0).to(tl.float32)[:, None]
        up += tl.load(at + num_outputs, mask=real, other=0.0).to(tl.float32)[:, None]
    if CLAMPS:
        # Not `tl.minimum`, which would make a number of what is none.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        gated = gate * logistic(alpha * gate)
    else:
        gated = gate * logistic(gate)
    to = place[None, :] * num_outputs + output[:, None]
    tl.store(out + to, (gated * up).to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit(do_not_specialize=_FREE)
def _outputs(
    channels,
    weight,
    bias,
    out,
    places,
    tiles,
    num_places,
    size,
    num_outputs,
    per_row,
    num_slots,
    first_slot,
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ALL: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile and part of the outputs: those of the tile's places, in the slots of their rows."""
    expert, place, count = _tile(places, tiles, num_places, LINES, IS_ALL)
    if count == 0:
        return
    there = tl.arange(0, LINES) < count
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < num_outputs
    matrix = weight + expert * num_outputs * size
    total = tl.zeros([OUTPUTS, LINES], tl.float32)
    for first in tl.range(0, size, CHANNELS, num_stages=STAGES):
        channel = first + tl.arange(0, CHANNELS)
        given = there[:, None]
        if not EVEN:
            given = given & (channel < size)[None, :]
        own = tl.load(channels + place[:, None] * size + channel[None, :], mask=given, other=0.0)
        tile = _loaded(matrix, output, channel, size, real, EVEN).to(OPERAND)
        total = tl.dot(tile, tl.trans(own).to(OPERAND), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * num_outputs + output, mask=real, other=0.0).to(tl.float32)[:, None]
    line = place // per_row * num_slots + place % per_row + first_slot
    tl.store(out + line[None, :] * num_outputs + output[:, None], total, mask=real[:, None] & there[None, :])


@triton.jit
def _mix(parts, weights, gates, out, size, ACTIVE: tl.constexpr, SLOTS: tl.constexpr, DIMS: tl.constexpr):
    """One program per row and part of its outputs: the weighted sum of its slots in their order."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    real = dim < size
    at = parts + row * SLOTS * size + dim
    total = tl.zeros([DIMS], tl.float32)
    for slot in range(ACTIVE):
        total += tl.load(weights + row * ACTIVE + slot) * tl.load(at + slot * size, mask=real, other=0.0)
    if SLOTS > ACTIVE:
        total += logistic(tl.load(gates + row)) * tl.load(at + ACTIVE * size, mask=real, other=0.0)
    tl.store(out + row * size + dim, total.to(out.dtype.element_ty), mask=real)


def run(mixture: StackedMixture, x: Tensor) -> Tensor:
    """`x` [T, D] through the experts that the router chooses, [T, D]."""
    num_rows, size = x.shape
    assert x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    experts, active = mixture.experts, mixture.num_active
    with torch.cuda.device_of(x):
        chosen, weights = choose(scores(x, mixture.router, mixture.router_bias), active, mixture.normalises)
        work = grouped(chosen, len(experts.gate_up), x.itemsize)
        num_slots = active + (mixture.shared is not None)
        parts = torch.empty(num_rows * num_slots, size, dtype=torch.float32, device=x.device)
        _run_stack(experts, work, x, parts, num_slots, 0)
        gates = None
        if mixture.shared is not None:
            assert mixture.shared_gate is not None
            gates = scores(x, mixture.shared_gate, None)
            _run_stack(mixture.shared, every_row(num_rows, x.itemsize), x, parts, num_slots, active)
        _mix[num_rows, triton.cdiv(size, _MIX_CHANNELS)](
            *(parts, weights, weights if gates is None else gates, out, size),
            ACTIVE=active,
            SLOTS=num_slots,
            DIMS=_MIX_CHANNELS,
            enable_fp_fusion=False,
        )
    return out


def _run_stack(
    experts: StackedExperts, work: ExpertPlaces, x: Tensor, parts: Tensor, num_slots: int, first_slot: int
) -> None:
    """What the experts make of each place of `x` [T, D], into slots of `parts` [T * S, D] from the first one on."""
    num_channels, size = experts.down.shape[2], x.shape[1]
    channels = torch.empty(work.num_places, num_channels, dtype=x.dtype, device=x.device)
    tiling, clamp = work.tiling, experts.clamp or (0.0, 0.0)
    assert experts.gate_up.is_contiguous()
    assert experts.down.is_contiguous()
    # Without them, the first of these is not read.
    places, tiles = (x if one is None else one for one in (work.places, work.tiles))
    sizes = {
        "LINES": tiling.lines,
        "OUTPUTS": tiling.outputs,
        "CHANNELS": tiling.channels,
        "STAGES": tiling.stages,
        "IS_ALL": work.places is None,
        "OPERAND": operand(x),
        "num_warps": tiling.warps,
        "enable_fp_fusion": False,
    }
    bias = experts.gate_up_bias
    _channels[work.num_tiles, triton.cdiv(num_channels, tiling.outputs)](
        *(x, experts.gate_up, x if bias is None else bias, channels, places, tiles, work.num_places),
        *(size, num_channels, x.stride(0), work.per_row, *clamp),
        EVEN=size % tiling.channels == 0,
        HAS_BIAS=bias is not None,
        CLAMPS=experts.clamp is not None,
        **sizes,
    )
    bias = experts.down_bias
    _outputs[work.num_tiles, triton.cdiv(size, tiling.outputs)](
        *(channels, experts.down, x if bias is None else bias, parts, places, tiles, work.num_places),
        *(num_channels, size, work.per_row, num_slots, first_slot),
        EVEN=num_channels % tiling.channels == 0,
        HAS_BIAS=bias is not None,
        **sizes,
    )
