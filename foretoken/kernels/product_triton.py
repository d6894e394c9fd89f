"""Products of few rows with a matrix as Triton kernels, which read the matrix once: what a step of decoding or of
verification multiplies by.

A program multiplies some outputs' weights by a tile of rows. A sum runs over the channels in their order, sixteen at a
time, in one accumulator: it is the same to the last bit for any number of rows and any tiling. Libraries choose another
order for another number of rows, so that a token that is verified may differ from one that is decoded. Tiles have at
most 32 outputs because larger ones are compiled to other matrix instructions on some devices.

`TRITON_INTERPRET=1`, set before this module is imported, runs the kernel on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.row_triton import KINDS, activated, operand

_NO_GATE = tl.constexpr(-1)


@triton.jit
def _loaded(weight, output, channel, size, num_outputs, EVEN: tl.constexpr):
    """A tile [OUTPUTS, CHANNELS] of the matrix [N, K]; it is read once."""
    at = weight + output.to(tl.int64)[:, None] * size + channel[None, :]
    there = (output < num_outputs)[:, None]
    if not EVEN:
        there = there & (channel < size)[None, :]
    return tl.load(at, mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _store(total, bias, residual, out, output, row, num_rows, num_outputs, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr):
    """Sums [OUTPUTS, ROWS] with bias and residual, rounded once."""
    there = (output < num_outputs)[:, None] & (row < num_rows)[None, :]
    to = row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        total += tl.load(residual + to, mask=there, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _store_gated(gate, up, bias, out, output, row, num_rows, num_outputs, GATE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The activation of the sums of the first half times those of the second, rounded once."""
    if HAS_BIAS:
        real = output < num_outputs
        gate += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + output + num_outputs, mask=real, other=0.0).to(tl.float32)[:, None]
    _store(activated(gate, GATE) * up, bias, bias, out, output, row, num_rows, num_outputs, False, False)


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for all numbers, each of which would be compiled
def _multiply(
    x,
    weight,
    bias,
    residual,
    out,
    num_rows,
    size,
    num_outputs,
    row_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """One program per tile of rows and `PARTS` tiles of outputs, one or two; tiles of rows lie next to one another, so
    that they find the weights in the cache. With a gate, the parts are outputs of its first half and of its second.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = (row < num_rows)[:, None]
    line = tl.arange(0, OUTPUTS)
    if GATE == _NO_GATE:
        first_output = tl.program_id(1) * (OUTPUTS * PARTS) + line
        second_output = first_output + OUTPUTS
        num_weights = num_outputs
    else:
        first_output = tl.program_id(1) * OUTPUTS + line
        second_output = first_output + num_outputs
        num_weights = 2 * num_outputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    second_total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    of_row = x + row.to(tl.int64)[:, None] * row_stride
    for first in tl.range(0, size, CHANNELS, num_stages=STAGES):
        channel = first + tl.arange(0, CHANNELS)
        there = real
        if not EVEN:
            there = there & (channel < size)[None, :]
        rows = tl.trans(tl.load(of_row + channel[None, :], mask=there, other=0.0)).to(OPERAND)  # [CHANNELS, ROWS]
        tile = _loaded(weight, first_output, channel, size, num_weights, EVEN).to(OPERAND)
        total = tl.dot(tile, rows, total)
        if PARTS == 2:
            tile = _loaded(weight, second_output, channel, size, num_weights, EVEN).to(OPERAND)
            second_total = tl.dot(tile, rows, second_total)
    if GATE != _NO_GATE:
        _store_gated(total, second_total, bias, out, first_output, row, num_rows, num_outputs, GATE, HAS_BIAS)
    else:
        _store(total, bias, residual, out, first_output, row, num_rows, num_outputs, HAS_BIAS, ADDS)
        if PARTS == 2:
            _store(second_total, bias, residual, out, second_output, row, num_rows, num_outputs, HAS_BIAS, ADDS)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut; no bit of a result depends on it."""

    rows: int
    outputs: int
    parts: int  # tiles of outputs of a program, one or two; two with a gate
    channels: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Operands:
    """Rows [T, K], a matrix [N, K], and what is added to their product: `bias` [N] and `residual` [T, N]. With an
    `activation`, that of the first half of the product times the second is the result.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    activation: str | None = None

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return len(self.weight) // (1 if self.activation is None else 2)


_MAX_ROWS = 128  # of a tile
_MANY_OUTPUTS = 8448  # of which tiles of 32 fill an H200 twice


@cache
def tiling_of(num_rows: int, num_outputs: int, size: int, is_gated: bool = False) -> Tiling:
    """The tiling of `num_rows` rows of `size` channels and `num_outputs` outputs: the fastest of a sweep on an H200."""
    rows = max(16, min(_MAX_ROWS, triton.next_power_of_2(num_rows)))
    is_wide = is_gated or num_outputs >= _MANY_OUTPUTS
    if rows > 64:
        return Tiling(rows, 32, 2, 32, 5, 4)
    if rows > 16:
        channels = 256 if rows == 32 else 64 if is_wide else 128
        return Tiling(rows, 32, 2 if is_wide else 1, channels, 3, 2)
    if is_wide:
        return Tiling(rows, 32, 2 if is_gated else 1, 64, 6, 2)
    return Tiling(rows, 16, 1, 512, 3, 2) if size >= 1024 else Tiling(rows, 16, 1, 128, 6, 2)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`x` [T, K] times the transpose of `weight` [N, K], plus `bias` [N] and `residual` [T, N]: [T, N]."""
    return _result(Operands(x, weight, bias, residual))


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`row_triton.gate` of the product of `x` [T, K] and `weight` [2 I, K], which is not rounded in between: [T, I]."""
    return _result(Operands(x, weight, bias, activation=activation))


def _result(of: Operands) -> Tensor:
    return tiled(of, tiling_of(len(of.x), of.num_outputs, of.x.shape[1], of.activation is not None))


def tiled(of: Operands, tiling: Tiling) -> Tensor:
    """The product by a given tiling."""
    x, weight = of.x, of.weight
    num_rows, size, num_outputs = *x.shape, of.num_outputs
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert of.residual is None or of.residual.is_contiguous()
    if not num_rows:
        return out
    of_program = tiling.outputs * (tiling.parts if of.activation is None else 1)
    with torch.cuda.device_of(x):
        _multiply[triton.cdiv(num_rows, tiling.rows), triton.cdiv(num_outputs, of_program)](
            *(x, weight, x if of.bias is None else of.bias, x if of.residual is None else of.residual, out),
            *(num_rows, size, num_outputs, x.stride(0)),
            ROWS=tiling.rows,
            OUTPUTS=tiling.outputs,
            PARTS=tiling.parts,
            CHANNELS=tiling.channels,
            STAGES=tiling.stages,
            EVEN=size % tiling.channels == 0,
            GATE=-1 if of.activation is None else KINDS[of.activation],
            HAS_BIAS=of.bias is not None,
            ADDS=of.residual is not None,
            OPERAND=operand(x),
            num_warps=tiling.warps,
            enable_fp_fusion=False,  # whatever the tiling, sums are added and gated alike
        )
    return out
