"""Weights in groups of inputs, multiplied in integers by a kernel that is compiled on first use; its twin in torch.

Activations are coded per row and 32 inputs: scale = max|x| / 127, codes of 8 bits (`code_rows`). The products inside a
group are sums of integers, exact in any order, and the groups are added in ascending order in float32. So a row's
result depends neither on the rows beside it nor on the number of threads: a verification pass equals single-row
decoding bit for bit. `kernels/grouped.cpp` has the formula and the instructions.

The twin (`products`) computes the same bits with torch's own operations, slowly, and stands in where nothing can be
compiled: sums inside a group are integers below 2^24, which float32 holds exactly in any order of summation, so an
ordinary matrix product computes them; all else is one rounded operation at a time, in the kernel's order.

A row of activations that holds NaN or infinity gives NaN for every output; the other rows are not touched by it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import loaded, opened
from foretoken.model.matrices.codes import (
    BLOCK_ROWS,
    SUPER,
    GroupedCodes,
    laid_out,
    large_page_tensor,
    stored_bits,
    unpacked,
)
from foretoken.model.matrices.dense import ARGUMENTS, CompiledWeight, Multiply, Product, array_of

SPAN = 32  # inputs that share a scale of activations
_CHUNK_BLOCKS = 64  # 1,024 outputs are turned into float32 at a time


def products(weight: GroupedWeight, x: Tensor) -> Tensor:
    """`x` [T, K] float32 times the transpose of `weight`, [T, N] float32."""
    codes, scales = code_rows(x)
    parts = [
        _of_blocks(weight, slice(start, start + _CHUNK_BLOCKS), codes, scales)
        for start in range(0, len(weight.codes), _CHUNK_BLOCKS)
    ]
    return torch.cat(parts, dim=1)[:, : weight.num_rows]


def code_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [T, spans * 32] in -127..127, as float32, and scales [T, spans] of the activations `x` [T, K] float32.

    Codes are the nearest of x / scale, ties to even. A span that holds NaN or infinity has the scale NaN and codes 0.
    """
    spans = F.pad(x, (0, -x.shape[1] % SPAN)).view(len(x), -1, SPAN)
    is_finite = torch.isfinite(spans).all(2)
    scales = torch.where(is_finite, spans.abs().amax(2) / 127, torch.nan)
    nearest = (spans / scales[..., None]).round().clamp(-127, 127)
    codes = torch.where((scales > 0)[..., None], nearest, 0.0)
    return codes.view(len(x), -1), scales


def _of_blocks(weight: GroupedWeight, blocks: slice, codes: Tensor, x_scales: Tensor) -> Tensor:
    """The outputs of some blocks, [T, N']."""
    group = weight.group
    stored = unpacked(weight.codes[blocks], weight.bits, group)  # [B, groups, group / 4, 16, 4]
    # [groups, group, N']
    numbers = stored.permute(1, 2, 4, 0, 3).reshape(stored.shape[1], group, -1).float() - weight.zero
    inputs = codes.view(len(codes), -1, group).transpose(0, 1)  # [groups, T, group]
    dots, sums = torch.bmm(inputs, numbers), inputs.sum(2)  # [groups, T, N'], [groups, T]
    scales, minimums = (None if own is None else _by_group(own) for own in weight.numbers(blocks))
    assert scales is not None
    total = torch.zeros(len(codes), scales.shape[1], dtype=torch.float32)
    for index in range(len(scales)):
        part = scales[index] * dots[index]
        if minimums is not None:
            part = part + minimums[index] * sums[index, :, None]
        total = total + part * x_scales[:, index * group // SPAN, None]
    return total


def _by_group(numbers: Tensor) -> Tensor:
    """`[B, groups, 16]` as `[groups, 16 B]`."""
    return numbers.transpose(0, 1).reshape(numbers.shape[1], len(numbers) * BLOCK_ROWS)


SOURCE = Path(__file__).resolve().parents[2] / "kernels" / "grouped.cpp"
INSTRUCTIONS = ("plain C++", "AVX2", "AVX-512 VNNI", "AMX")
_INTERFACE = 4  # of the compiled library: what its function takes
_FORMS = {torch.float32: 0, torch.float16: 1, torch.int8: 2}  # of scales, and of minimums if those are the same
_MULTIPLE = 3  # minimums in int8 beside scales in float16


class _Matrix(ctypes.Structure):
    """`foretoken_matrix` of the kernel."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("super_scales", ctypes.c_void_p),
        ("super_minimums", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("form", ctypes.c_int32),
    )


_Index: TypeAlias = slice | tuple[Tensor, slice, Tensor]


@dataclass(frozen=True)
class GroupedWeight(CompiledWeight):
    """A matrix [N, K], or a table of rows, in the kernel's layout.

    `codes` [blocks, groups, group * bits / 32, 16, 4] uint8, see the module `codes`. `scales` and `minimums` [blocks,
    groups, 16]: int8 where they are multiplied by `super_scales` and `super_minimums` [blocks, supers, 16] float16 of
    256 inputs, else float16 where that holds every one of them exactly, otherwise float32. Beside scales in float16,
    minimums in int8 are multiples of the scales. K is filled up to whole spans, N to whole blocks. `dtype` is that of
    `rows`.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    num_rows: int
    width: int
    zero: int
    bits: int
    group: int
    dtype: torch.dtype
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    @classmethod
    def of(cls, grouped: GroupedCodes, dtype: torch.dtype, width: int | None = None) -> GroupedWeight:
        """`grouped` in this layout, nothing rounded; its first `width` inputs are meant (None: all)."""
        assert grouped.group == SPAN // 2 or grouped.group % SPAN == 0, "groups of 16, or of whole spans"
        num_rows, full = grouped.codes.shape
        group, repeats = min(grouped.group, SPAN), max(1, grouped.group // SPAN)
        missing, spare = -full % SPAN, -num_rows % BLOCK_ROWS
        codes = grouped.codes
        if missing or spare:
            codes = F.pad(codes, (0, missing, 0, spare), value=grouped.zero)
        bits = stored_bits(grouped.bits, group)
        supers: tuple[Tensor | None, Tensor | None] = (None, None)
        if grouped.whole is not None and bool(torch.isfinite(grouped.scales).all()):
            assert full % SUPER == 0, "whole blocks of 256 inputs"
            assert repeats == 1, "groups of 16 or 32"
            numbers = [grouped.whole.scales, grouped.whole.minimums]
            supers = (grouped.whole.super_scales, grouped.whole.super_minimums)
        else:
            numbers = [
                own if own is None or repeats == 1 else own.repeat_interleave(repeats, 1) for own in _smallest(grouped)
            ]
        scales, minimums, super_scales, super_minimums = (
            None if own is None else _in_blocks(F.pad(own, (0, extra, 0, spare)))
            for own, extra in zip((*numbers, *supers), (missing // group, missing // group, 0, 0), strict=True)
        )
        assert scales is not None
        return cls(
            codes=laid_out(codes, bits, group),
            scales=scales,
            minimums=minimums,
            num_rows=num_rows,
            width=full if width is None else width,
            zero=grouped.zero,
            bits=bits,
            group=group,
            dtype=dtype,
            super_scales=super_scales,
            super_minimums=super_minimums,
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N]."""
        return _multiply((self,), self.product, x, bias)

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` [T] int64 as numbers, [T, K].

        Raises:
            IndexError: there is no such row.
        """
        compiled, product = kernel(), self.product
        if compiled is None or product is None or self.dtype not in (torch.float32, torch.bfloat16):
            return self._rows(index)
        index, out = index.contiguous(), torch.empty(len(index), self.width, dtype=self.dtype)
        is_bf16 = self.dtype == torch.bfloat16
        if not compiled.rows(product.parts, index.data_ptr(), len(index), self.width, out.data_ptr(), is_bf16):
            raise IndexError(f"a row outside the {self.num_rows} of the table")
        return out

    def _rows(self, index: Tensor) -> Tensor:
        """The twin of the compiled `rows`."""
        block, place = index // BLOCK_ROWS, index % BLOCK_ROWS
        codes = unpacked(self.codes[block, :, :, place], self.bits, self.group)  # [T, groups, group / 4, 4]
        scales, minimums = self.numbers((block, slice(None), place))
        grouped = GroupedCodes(
            codes.reshape(len(index), self.scales.shape[1] * self.group),
            scales,
            minimums,
            self.zero,
            self.bits,
            self.group,
        )
        return grouped.dequantised()[:, : self.width].to(self.dtype)

    def numbers(self, at: _Index) -> tuple[Tensor, Tensor | None]:
        """Scales and minimums of some outputs `at` in float32; groups are the second dimension of what comes back."""

        def full(own: Tensor, shared: Tensor | None) -> Tensor:
            if shared is None:
                return own[at].float()
            groups = shared[at].float().repeat_interleave(SUPER // self.group, dim=1)
            return groups * own[at].float()

        scales = full(self.scales, self.super_scales)
        if self.minimums is None:
            return scales, None
        minimums = full(self.minimums, self.super_minimums)
        return scales, scales * minimums if self.form == _MULTIPLE else minimums

    @property
    def form(self) -> int:
        """Which numbers scales and minimums are: `Form` of the kernel."""
        if self.minimums is not None and self.minimums.dtype != self.scales.dtype:
            return _MULTIPLE
        return _FORMS[self.scales.dtype]

    @functools.cached_property
    def product(self) -> Product | None:
        """See `layers.PackedWeight`; None where nothing can be compiled."""
        return _product((self,))

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        own = (self.codes, self.scales, self.minimums, self.super_scales, self.super_minimums)
        return sum(tensor.nbytes for tensor in own if tensor is not None)


@dataclass(frozen=True)
class MergedWeight(CompiledWeight):
    """Matrices of one input whose outputs follow one another, each in a format of its own: [N1 + N2 + ..., K]."""

    parts: tuple[GroupedWeight, ...]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N1 + N2 + ...]."""
        return _multiply(self.parts, self.product, x, bias)

    @functools.cached_property
    def product(self) -> Product | None:
        """See `layers.PackedWeight`; None where nothing can be compiled."""
        return _product(self.parts)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(part.nbytes for part in self.parts)


def merged(parts: Sequence[GroupedWeight]) -> GroupedWeight | MergedWeight:
    """Matrices of one input as one."""
    return parts[0] if len(parts) == 1 else MergedWeight(tuple(parts))


def _smallest(grouped: GroupedCodes) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums in the smallest formats that hold them exactly, see `GroupedWeight`."""
    scales, minimums = grouped.scales, grouped.minimums
    if not _fits_half(scales):
        return scales, minimums
    if grouped.multiples is not None:
        return scales.half(), grouped.multiples
    if minimums is None:
        return scales.half(), None
    return (scales.half(), minimums.half()) if _fits_half(minimums) else (scales, minimums)


def _fits_half(numbers: Tensor) -> bool:
    """Whether float16 holds them all; it is for finite numbers only that the kernel takes what it holds."""
    return bool((torch.isfinite(numbers) & (numbers.half().to(numbers.dtype) == numbers)).all())


def _in_blocks(numbers: Tensor) -> Tensor:
    """`[16 B, G]` as `[B, G, 16]`."""
    split = numbers.view(-1, BLOCK_ROWS, numbers.shape[1]).transpose(1, 2)
    return large_page_tensor(split.shape, split.dtype).copy_(split)


def _multiply(parts: Sequence[GroupedWeight], product: Product | None, x: Tensor, bias: Tensor | None) -> Tensor:
    if product is not None:
        return product(x, bias)
    full = x.to(torch.float32)
    out = torch.cat([products(part, full) for part in parts], dim=1)
    return (out if bias is None else out + bias).to(x.dtype)


def _product(parts: Sequence[GroupedWeight]) -> Product | None:
    compiled = kernel()
    if compiled is None:
        return None
    num_outputs = sum(part.num_rows for part in parts)
    return Product(compiled.multiply, array_of(_Matrix, [_matrix(part) for part in parts]), parts[0].width, num_outputs)


def _matrix(weight: GroupedWeight) -> _Matrix:
    tensors = (weight.codes, weight.scales, weight.minimums, weight.super_scales, weight.super_minimums)
    return _Matrix(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(weight.num_rows, weight.bits, weight.group, weight.zero, weight.form),
    )


class GroupedKernel(NamedTuple):
    """The functions of the compiled library: the product, and rows of a table."""

    multiply: Multiply
    rows: Callable[..., bool]


@functools.cache
def kernel() -> GroupedKernel | None:
    """The compiled functions, None where there are none (the first time with a warning)."""
    return loaded(SOURCE, load, "quantised weights run in torch's own operations, many times slower")


def load(path: Path) -> GroupedKernel:
    """The functions of the compiled library `path`."""
    library = opened(path, "foretoken_grouped_interface", _INTERFACE)
    multiply, rows = library.foretoken_grouped_multiply, library.foretoken_grouped_rows
    multiply.argtypes, multiply.restype = ARGUMENTS, ctypes.c_bool
    rows.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 2, ctypes.c_void_p, ctypes.c_int)
    rows.restype = ctypes.c_bool
    return GroupedKernel(multiply, rows)


def instructions(path: Path) -> str:
    """What the compiled library `path` multiplies with: one of `INSTRUCTIONS`."""
    return INSTRUCTIONS[ctypes.CDLL(str(path)).foretoken_grouped_instructions()]
