"""Weights in 8 or 4 bits for drafts, multiplied by kernels that torch ships for the CPU.

Weight-only: activations, norms, biases and the cache keep their 16 or 32 bits, so that a row's result depends on no
other row. Both forms are symmetric, which keeps an exact zero exact. A draft that rounds its weights draws from another
distribution than the full model; that distribution is the mass of its draft, so verification stays exact.

- int8: one scale per output row, max|w| / 127. The embedding table is kept this way too, in both formats, and shared
  with a tied head.
- int4: one scale per group of inputs in a row; the entry of largest magnitude takes the code -8 (as in llama.cpp's
  Q4_0). A matrix whose input size no group divides is kept in int8.

Scales are rounded to the activations' format before codes are chosen, because the kernels take them in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.config import QUANTISED
from foretoken.errors import InputError

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)

GROUPS = (64, 32)  # inputs that share an int4 scale; the first that divides the input size
_ROW_MULTIPLE = 16  # the int4 kernel's output rows
# Rows that are quantised at a time: a multiple of 64, the widest block of the int4 layout, so that pieces fit together.
_BLOCK_ROWS = 256
# Rows of an int8 matrix that are turned back into numbers at a time: what the processor's own caches hold.
_CHUNK_ROWS = 512
# From here on a prompt's rows are cheaper against weights turned back into numbers: the int8 kernel's time grows with
# every row.
_MANY_ROWS = 24


@dataclass(frozen=True)
class Int8Weight:
    """`codes` [N, K] int8 and `scales` [N] in the activations' dtype: a matrix, or a table of rows."""

    codes: Tensor
    scales: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N]."""
        if 0 < x.shape[0] < _MANY_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), self.codes, self.scales)
        else:
            out = x.new_empty(x.shape[0], self.codes.shape[0])
            for start in range(0, self.codes.shape[0], _CHUNK_ROWS):
                rows = slice(start, start + _CHUNK_ROWS)
                out[:, rows] = F.linear(x, self.codes[rows].to(x.dtype))
            out *= self.scales
        return out if bias is None else out + bias

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` [T] as numbers, [T, K]."""
        return self.codes[index].to(self.scales.dtype) * self.scales[index, None]

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Int4Weight:
    """`packed` [N', K / 2] uint8 in the layout of this machine's kernel, N' = N rounded up; `grid` [K / group, N', 2]:
    scale and zero point.
    """

    packed: Tensor
    grid: Tensor
    num_rows: int
    group: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N]."""
        if x.shape[0] == 0:
            return x.new_empty(0, self.num_rows)
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group, self.grid)
        out = out[:, : self.num_rows]
        return out if bias is None else out + bias

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.packed.nbytes + self.grid.nbytes


QuantWeight: TypeAlias = Int8Weight | Int4Weight


def check_quant(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a weight format that nothing here multiplies.

    Raises:
        InputError: unknown, or not with activations of this dtype or on this device.
    """
    if kind not in QUANTISED:
        raise InputError("weights", kind, f"choose one of auto, {', '.join(QUANTISED)}")
    if device.type != "cpu":
        raise InputError(
            "weights", kind, f"runs on the CPU only and this model goes to {device}; load it in bfloat16 there"
        )
    if dtype not in ACTIVATIONS:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            "weights", kind, f"does not go with dtype={name!r}; take bfloat16, float16 or float32 for one of them"
        )


class RowBlocks:
    """The rows of a matrix that comes as `pieces`, 2-D tensors of equal width whose rows follow one another; they may
    be views of a mapped file.

    They are converted some rows at a time in memory that is used again: besides the codes little is allocated, and
    nothing that would leave holes between matrices when it goes.
    """

    def __init__(self) -> None:
        self._full = torch.empty(0)

    def of(self, pieces: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first row, the rows in float32), `_BLOCK_ROWS` at a time, each valid until the next."""
        width, start, filled = pieces[0].shape[1], 0, 0
        self._full = _grown(self._full, _BLOCK_ROWS * width)
        block = self._full[: _BLOCK_ROWS * width].view(_BLOCK_ROWS, width)
        for piece in pieces:
            taken = 0
            while taken < len(piece):
                count = min(len(piece) - taken, _BLOCK_ROWS - filled)
                block[filled : filled + count] = piece[taken : taken + count]
                taken, filled = taken + count, filled + count
                if filled == _BLOCK_ROWS:
                    yield start, block
                    start, filled = start + filled, 0
        if filled:
            yield start, block[:filled]


class Quantiser:
    """Turns matrices into codes of the format `kind`, for activations in `dtype`.

    A matrix comes as `pieces`, see `RowBlocks`.
    """

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        assert kind in QUANTISED
        assert dtype in ACTIVATIONS
        self.kind, self.dtype = kind, dtype
        self._blocks, self._stored = RowBlocks(), torch.empty(0, dtype=torch.int32)

    def matrix(self, pieces: Sequence[Tensor]) -> QuantWeight:
        """All pieces [n, K] as one matrix [N, K]."""
        group = next((size for size in GROUPS if pieces[0].shape[1] % size == 0), None)
        return self.table(pieces) if self.kind == "int8" or group is None else self._int4(pieces, group)

    def table(self, pieces: Sequence[Tensor]) -> Int8Weight:
        """All pieces [n, K] as one matrix [N, K] in int8, whose rows can be read too."""
        codes = torch.empty(sum(map(len, pieces)), pieces[0].shape[1], dtype=torch.int8)
        scales = torch.empty(len(codes), dtype=self.dtype)
        for start, block in self._blocks.of(pieces):
            rows = slice(start, start + len(block))
            scales[rows] = row_codes(block, self.dtype)
            codes[rows] = block
        return Int8Weight(codes, scales)

    def _int4(self, pieces: Sequence[Tensor], group: int) -> Int4Weight:
        num_rows, width = sum(map(len, pieces)), pieces[0].shape[1]
        padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
        packed = torch.empty(padded, width // 2, dtype=torch.uint8)
        grid = torch.zeros(width // group, padded, 2, dtype=self.dtype)
        self._stored = _grown(self._stored, _BLOCK_ROWS * width)
        for start, block in self._blocks.of(pieces):
            grid[:, start : start + len(block), 0] = group_codes(block, group, self.dtype).T
            stop = min(start + _BLOCK_ROWS, padded)
            stored = self._stored[: (stop - start) * width].view(-1, width)
            stored[: len(block)] = block.add_(8)
            stored[len(block) :] = 8  # the code of 0
            packed[start:stop] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored, 1)
        return Int4Weight(packed, grid, num_rows, group)


def matrix_bytes(kind: str, num_rows: int, width: int, itemsize: int) -> int:
    """Memory of a matrix [N, K] in the format `kind`, whose activations have numbers of `itemsize` bytes."""
    group = next((size for size in GROUPS if width % size == 0), None)
    if kind == "int8" or group is None:
        return table_bytes(num_rows, width, itemsize)
    padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    return padded * (width // 2) + 2 * (width // group) * padded * itemsize


def table_bytes(num_rows: int, width: int, itemsize: int) -> int:
    """Memory of a table [N, K] whose rows can be read: int8 codes, and a scale per row."""
    return num_rows * (width + itemsize)


def row_codes(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn the rows of `full` [N, K] float32, in place, into codes in -127..127; the scales [N] that go with them, in
    `dtype`.
    """
    scales = _scales(torch.linalg.vector_norm(full, float("inf"), dim=1) / 127, dtype)
    full.div_(scales[:, None].float()).round_().clamp_(-127, 127)
    return scales


def group_codes(full: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turn every group of `full` [N, K] float32, in place, into codes in -8..7; the scales [N, K / group] that go with
    them, in `dtype`.
    """
    groups = full.view(len(full), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scales = _scales(torch.where(high > -low, high, low) / -8, dtype)
    groups.div_(scales[..., None].float()).round_().clamp_(-8, 7)
    return scales


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """`wanted` rounded to `dtype`; 1 where nothing is left of it, since all codes are 0 there."""
    scales = wanted.to(dtype)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _grown(buffer: Tensor, size: int) -> Tensor:
    return buffer if buffer.numel() >= size else buffer.new_empty(size)
