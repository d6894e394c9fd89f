"""Weights in groups of inputs, multiplied in integers by a kernel that is compiled on first use.

Activations are coded per row and 32 inputs: scale = max|x| / 127, codes of 8 bits (`grouped_twin.code_rows`). The
products inside a group are sums of integers, exact in any order, and the groups are added in ascending order in
float32. So a row's result depends neither on the rows beside it nor on the number of threads: a verification pass
equals single-row decoding bit for bit. `kernels/grouped.cpp` has the formula and the instructions; `grouped_twin`
computes the same bits with torch's own operations, and stands in where nothing can be compiled.

A row of activations that holds NaN or infinity gives NaN for every output; the other rows are not touched by it.

Layout: blocks of 16 outputs, in which four inputs of one output stand together, as one lane of the processor's 8-bit
product reads them. 5 and 6 bits take a byte, 4 bits a half.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import BuildError, built
from foretoken.model.grouped import GroupedCodes
from foretoken.model.grouped_twin import BLOCK_ROWS, SPAN, products

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "grouped.cpp"
INSTRUCTIONS = ("plain C++", "AVX2", "AVX-512 VNNI")
_INTERFACE = 1  # of the compiled library: what its function takes
_CHUNK = 4  # inputs of one output that stand together

# x [T, K], num_rows, width, codes, scales, minimums, num_outputs, bits, group, zero, is_half, out, stride, threads
_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int),
)
Multiply = Callable[..., bool]


class KernelWarning(UserWarning):
    """A kernel could not be compiled and a slower one stands in; the message ends with a remedy."""


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix [N, K], or a table of rows, in the kernel's layout.

    `codes` [blocks, groups, group / 4, 16, 4] uint8, or with 4 bits [blocks, groups, group / 8, 16, 4]: the first half
    of a group in the low nibbles, the second in the high ones. `scales` and `minimums` [blocks, groups, 16]: float16
    where that holds every one of them exactly, otherwise float32. K is filled up to whole spans, N to whole blocks.
    `dtype` is that of `rows`.
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
        bits = 4 if grouped.bits <= 4 else 8
        numbers = [
            F.pad(own.repeat_interleave(repeats, 1) if repeats > 1 else own, (0, missing // group, 0, spare))
            for own in (grouped.scales, grouped.minimums)
            if own is not None
        ]
        if all(torch.equal(own.half().to(own.dtype), own) for own in numbers):
            numbers = [own.half() for own in numbers]
        laid_out = [own.view(-1, BLOCK_ROWS, own.shape[1]).transpose(1, 2).contiguous() for own in numbers]
        return cls(
            codes=_laid_out(codes, bits, group),
            scales=laid_out[0],
            minimums=laid_out[1] if grouped.minimums is not None else None,
            num_rows=num_rows,
            width=full if width is None else width,
            zero=grouped.zero,
            bits=bits,
            group=group,
            dtype=dtype,
        )

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N]."""
        return _multiply((self,), x, bias)

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` [T] as numbers, [T, K]."""
        block, place = index // BLOCK_ROWS, index % BLOCK_ROWS
        minimums = None if self.minimums is None else self.minimums[block, :, place].float()
        codes = self.codes[block, :, :, place]  # [T, groups, group / 4, 4], or half as many bytes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        grouped = GroupedCodes(
            codes.reshape(len(index), self.scales.shape[1] * self.group),
            self.scales[block, :, place].float(),
            minimums,
            self.zero,
            self.bits,
            self.group,
        )
        return grouped.dequantised()[:, : self.width].to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.codes.nbytes + self.scales.nbytes + minimums


@dataclass(frozen=True)
class MergedWeight:
    """Matrices of one input whose outputs follow one another, each in a format of its own: [N1 + N2 + ..., K]."""

    parts: tuple[GroupedWeight, ...]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, [T, N1 + N2 + ...]."""
        return _multiply(self.parts, x, bias)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(part.nbytes for part in self.parts)


def merged(parts: Sequence[GroupedWeight]) -> GroupedWeight | MergedWeight:
    """Matrices of one input as one."""
    return parts[0] if len(parts) == 1 else MergedWeight(tuple(parts))


def _laid_out(codes: Tensor, bits: int, group: int) -> Tensor:
    """`codes` [16 B, K] in the layout of `GroupedWeight.codes`."""
    split = codes.view(-1, BLOCK_ROWS, codes.shape[1] // group, group // _CHUNK, _CHUNK).permute(0, 2, 3, 1, 4)
    if bits == 8:
        return split.contiguous()
    half = group // _CHUNK // 2
    return (split[:, :, :half] | split[:, :, half:] << 4).contiguous()


def _multiply(parts: Sequence[GroupedWeight], x: Tensor, bias: Tensor | None) -> Tensor:
    function, num_rows = kernel(), sum(part.num_rows for part in parts)
    full = x.to(torch.float32).contiguous()
    out = torch.empty(len(x), num_rows)
    start = 0
    for part in parts if len(x) else ():
        if function is None:
            out[:, start : start + part.num_rows] = products(part, full)
        elif not function(
            *(full.data_ptr(), len(x), part.width),
            *(
                part.codes.data_ptr(),
                part.scales.data_ptr(),
                part.minimums.data_ptr() if part.minimums is not None else 0,
            ),
            *(part.num_rows, part.bits, part.group, part.zero, part.scales.dtype == torch.float16),
            *(out.data_ptr() + start * out.itemsize, num_rows, torch.get_num_threads()),
        ):
            raise MemoryError(f"no memory for the codes of {len(x)} rows of activations; run fewer rows at a time")
        start += part.num_rows
    if bias is not None:
        out += bias
    return out.to(x.dtype)


@functools.cache
def kernel() -> Multiply | None:
    """The compiled product, None where there is none (the first time with a warning)."""
    try:
        return load(built(SOURCE))
    except BuildError as error:
        warnings.warn(
            KernelWarning(f"quantised weights run in torch's own operations, many times slower: {error}"), stacklevel=2
        )
        return None


def load(path: Path) -> Multiply:
    """The product of the compiled library `path`.

    Raises:
        BuildError: it cannot be loaded here, or is none of ours.
    """
    try:
        library = ctypes.CDLL(str(path))  # its functions run without the interpreter's lock
        interface: int = library.foretoken_grouped_interface()
        function = library.foretoken_grouped_multiply
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled library cannot be loaded ({error}); delete {path}") from error
    if interface != _INTERFACE:
        raise BuildError(f"{path} has interface {interface}, not {_INTERFACE}; delete it")
    function.argtypes, function.restype = _ARGUMENTS, ctypes.c_bool
    return function


def instructions(path: Path) -> str:
    """What the compiled library `path` multiplies with: one of `INSTRUCTIONS`."""
    return INSTRUCTIONS[ctypes.CDLL(str(path)).foretoken_grouped_instructions()]
