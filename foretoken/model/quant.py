"""Weights in 8 or 4 bits for drafts, multiplied by kernels that torch ships for the CPU.

Weight-only: activations, norms, biases and the cache keep their 16 or 32 bits, so that a row's result depends on no other row.
Both forms are symmetric, which keeps an exact zero exact. A draft that rounds its weights draws from another law than the full
model; that law is the one it hands over as mass, so nothing else has to know.

- int8: one scale per output row, max|w| / 127. The embedding table is kept this way too, in both formats, and shared with a tied head.
- int4: one scale per group of inputs in a row; the entry of largest magnitude takes the code -8 (as in llama.cpp's Q4_0). A matrix
  whose input size no group divides is kept in int8.

Scales are rounded to the activations' format before codes are chosen, because the kernels take them in it.
"""

from __future__ import annotations

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
# Output rows that are converted at a time. A multiple of 64, the widest block of the int4 layout, so that pieces fit together.
_CHUNK_ROWS = 512
# From here on a prompt's rows are cheaper against weights turned back into numbers: the int8 kernel's time grows with every row.
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
    """`packed` [N', K / 2] uint8 in the layout of this machine's kernel, N' = N rounded up; `grid` [K / group, N', 2]: scale and zero point."""

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
        raise InputError("weights", kind, f"runs on the CPU only and this model goes to {device}; load it in bfloat16 there")
    if dtype not in ACTIVATIONS:
        name = str(dtype).removeprefix("torch.")
        raise InputError("weights", kind, f"does not go with dtype={name!r}; take bfloat16, float16 or float32 for one of them")


def quantise(weight: Tensor, kind: str) -> QuantWeight:
    """`weight` [N, K] on the CPU in the format `kind`; its dtype, one of `ACTIVATIONS`, is that of the rows to come.

    Needs the memory of the result and of some hundred rows in float32.
    """
    assert kind in QUANTISED
    assert weight.dtype in ACTIVATIONS
    group = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    return quantise_rows(weight) if kind == "int8" or group is None else _int4(weight, group)


def quantise_rows(weight: Tensor) -> Int8Weight:
    """`weight` [N, K] in int8, whose rows can be read too."""
    codes = torch.empty_like(weight, dtype=torch.int8)
    scales = weight.new_empty(len(weight))
    for start in range(0, len(weight), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        codes[rows], scales[rows] = row_codes(weight[rows])
    return Int8Weight(codes, scales)


def _int4(weight: Tensor, group: int) -> Int4Weight:
    num_rows, width = weight.shape
    padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    packed = torch.empty(padded, width // 2, dtype=torch.uint8)
    grid = weight.new_zeros(width // group, padded, 2)
    for start in range(0, num_rows, _CHUNK_ROWS):
        codes, scales = group_codes(weight[start : start + _CHUNK_ROWS], group)  # [n, K], [n, K / group]
        stored = F.pad(codes + 8, (0, 0, 0, -len(codes) % _ROW_MULTIPLE), value=8)
        packed[start : start + len(stored)] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored, 1)
        grid[:, start : start + len(codes), 0] = scales.T
    return Int4Weight(packed, grid, num_rows, group)


def row_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [N, K] int8 in -127..127, scales [N]) with `weight` [N, K] close to `codes * scales[:, None]`."""
    full = weight.float()
    scales = _scales(full.abs().amax(1) / 127, weight.dtype)
    return (full / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def group_codes(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes [N, K] int32 in -8..7, scales [N, K / group]) with every group of `weight` [N, K] close to its codes times its scale."""
    full = weight.float().view(len(weight), -1, group)  # [N, K / group, group]
    extreme = full.gather(2, full.abs().argmax(2, keepdim=True))  # [N, K / group, 1], with its sign
    scales = _scales(extreme / -8, weight.dtype)
    codes = (full / scales.float()).round().clamp(-8, 7)
    return codes.flatten(1).to(torch.int32), scales[..., 0]


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """`wanted` rounded to `dtype`; 1 where nothing is left of it, since all codes are 0 there."""
    scales = wanted.to(dtype)
    return torch.where(scales == 0, torch.ones_like(scales), scales)
