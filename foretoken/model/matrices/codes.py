"""Weights in groups of inputs, as GGUF files, 4-bit checkpoints and MXFP4 hold them, and where the kernel finds each
code.

w = scale * (code - zero) + minimum, computed in float32 in this order: that is bit for bit what the formats' own
packages compute, so nothing is quantised again.

In memory a block is 16 outputs, a chunk 4 inputs: 64 bytes [16, 4] hold a code each, as one lane of the processor's
8-bit product reads them. Below 8 bits the lower half of a group's chunks lies in the low nibbles of such lines and the
upper half in the high ones; with 5 or 6 bits one more line holds the bits above those, of chunk c from bit
(bits - 4) * c on.

Large pages: a page of 4 KB ends a prefetcher's run and costs a walk through the page table; weights in pages of 2 MB
are read up to twice as fast. Linux gives them on request (`madvise`); elsewhere this is ordinary memory. The matrices
of a small model do not fill such a page, so those of a model share them (`SharedPages`).

MXFP4 (OCP Microscaling Formats 1.0): the sixteen floats are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: whole
numbers from -12 to 12 times a half, so that codes of 5 bits hold them exactly.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LARGE_PAGE_BYTES = 2**21
_CHUNK_BYTES = 2**28  # of `SharedPages`: only what is written to takes memory
_LINE_BYTES = 64


def large_page_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the CPU that is not filled, on a page's boundary if it takes at least one large page."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping until the last tensor of it is gone
        start = -whole.data_ptr() % LARGE_PAGE_BYTES
        # Whole pages only: one that the end fills in part would be resident all the same.
        memory.madvise(mmap.MADV_HUGEPAGE, start, size - size % LARGE_PAGE_BYTES)
    except OSError:  # a system built without large pages, or no memory, which the next line reports
        return torch.empty(shape, dtype=dtype)
    return whole[start : start + size].view(dtype).view(shape)


Allocate = Callable[[Sequence[int], torch.dtype], Tensor]  # a contiguous tensor on the CPU that is not filled


class SharedPages:
    """Large pages for tensors that stay as long as one another, such as the weights of a model: they lie one after the
    other, and the memory of a chunk goes with the last of them.
    """

    def __init__(self) -> None:
        self._chunk, self._taken_bytes = torch.empty(0, dtype=torch.uint8), 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Allocate`; it begins at a line of the cache."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._chunk) - self._taken_bytes:
            self._chunk, self._taken_bytes = large_page_tensor((max(size, _CHUNK_BYTES),), torch.uint8), 0
        found = self._chunk[self._taken_bytes : self._taken_bytes + size]
        self._taken_bytes += -(-size // _LINE_BYTES) * _LINE_BYTES
        return found.view(dtype).view(tuple(shape))


SUPER = 256  # inputs that share one float16 in a format whose scales are whole numbers


@dataclass(frozen=True)
class WholeScales:
    """Scales and minimums as the K formats store them: whole numbers of a group, times one float16 of 256 inputs.

    `scales` and `minimums` [N, K / group] int8; `super_scales` and `super_minimums` [N, K / 256] float16. The products
    are exact in float32.
    """

    scales: Tensor
    super_scales: Tensor
    minimums: Tensor | None = None
    super_minimums: Tensor | None = None


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix [N, K] before any kernel laid it out.

    `codes` [N, K] uint8 below 2 ** `bits`; `scales` [N, K / group] float32; `minimums` the same shape, or None for a
    format without; `zero` is the code of 0, the same for all groups (128 for Q8_0, 8 for Q4_0, 0 for Q4_K, 32 for
    Q6_K). `whole`: what `scales` and `minimums` are products of, in a format that stores them so. `multiples` [N,
    K / group] int8: `minimums` divided by `scales`, in a format with a zero point per group.
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    zero: int
    bits: int
    group: int
    whole: WholeScales | None = None
    multiples: Tensor | None = None

    def dequantised(self) -> Tensor:
        """The matrix as numbers, [N, K] float32."""
        grouped = self.codes.view(len(self.codes), self.scales.shape[1], self.group).to(torch.int32) - self.zero
        full = self.scales[..., None] * grouped.to(torch.float32)
        if self.minimums is not None:
            full = full + self.minimums[..., None]
        return full.view(self.codes.shape)

    @classmethod
    def joined(cls, parts: Sequence[GroupedCodes]) -> GroupedCodes:
        """The matrix whose rows come in `parts` of one format."""
        return _of_each(parts, torch.cat) if len(parts) > 1 else parts[0]

    def reordered(self, change: Callable[[Tensor], Tensor]) -> GroupedCodes:
        """The matrix whose rows `change` [N, ...] -> [N, ...] puts into another order."""
        return _of_each([self], lambda own: change(own[0]))


_Held = TypeVar("_Held", GroupedCodes, WholeScales)


def _of_each(parts: Sequence[_Held], change: Callable[[list[Tensor]], Tensor]) -> _Held:
    """What `parts` become whose tensors of one field `change` makes one tensor of."""
    found: dict[str, Any] = {}
    for field in fields(parts[0]):
        own = [getattr(part, field.name) for part in parts]
        if isinstance(own[0], Tensor):
            found[field.name] = change(own)
        elif isinstance(own[0], WholeScales):
            found[field.name] = _of_each(own, change)
    return replace(parts[0], **found)


BLOCK_ROWS = 16  # outputs of a block
_CHUNK = 4  # inputs of one output that stand together


def stored_bits(bits: int, group: int) -> int:
    """Bits that a code of `bits` takes: 5 in groups of 32, 6 in groups of 16, else 4 or 8."""
    if bits <= 4:
        return 4
    if group == 32:
        return 5 if bits == 5 else 8
    return 6 if bits <= 6 else 8


def codes_shape(blocks: int, groups: int, bits: int, group: int) -> tuple[int, ...]:
    """Shape of laid out codes: [blocks, groups, lines, 16, 4]."""
    return blocks, groups, group * bits // 32, BLOCK_ROWS, _CHUNK


def laid_out(codes: Tensor, bits: int, group: int) -> Tensor:
    """`codes` [16 B, K] in `codes_shape`, with `bits` of `stored_bits`."""
    split = codes.view(-1, BLOCK_ROWS, codes.shape[1] // group, group // _CHUNK, _CHUNK).permute(0, 2, 3, 1, 4)
    out = large_page_tensor(codes_shape(split.shape[0], split.shape[1], bits, group), torch.uint8)
    if bits == 8:
        return out.copy_(split)
    half, above = group // _CHUNK // 2, bits - 4
    torch.bitwise_or(split[:, :, :half] & 15, split[:, :, half:] << 4, out=out[:, :, :half])
    if above:
        line = out[:, :, half]  # [blocks, groups, 16, 4]
        line.zero_()
        for chunk in range(2 * half):
            line |= (split[:, :, chunk] >> 4) << above * chunk
    return out


def unpacked(stored: Tensor, bits: int, group: int) -> Tensor:
    """Codes `[A, groups, group / 4, ...]` of laid out ones `[A, groups, lines, ...]`."""
    if bits == 8:
        return stored
    half, above = group // _CHUNK // 2, bits - 4
    low = stored[:, :, :half]
    codes = torch.cat((low & 15, low >> 4), dim=2)
    for chunk in range(2 * half if above else 0):
        codes[:, :, chunk] |= ((stored[:, :, half] >> above * chunk) & (2**above - 1)) << 4
    return codes


GROUP = 32  # weights that share a scale
ZERO, BITS = 12, 5
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint8)
_CODES = np.concatenate([ZERO + _HALVES, ZERO - _HALVES])  # by the bits of a float: the sign is the highest
_BIAS = 127 + 1  # of the exponent; one more for the halves


def codes_of(floats: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes of 4-bit floats, given by their bits, in the same shape."""
    found: npt.NDArray[np.uint8] = _CODES[floats]
    return found


def scales_of(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What a code, ZERO taken off, is multiplied by, for biased exponents of 8 bits."""
    return np.ldexp(np.float32(1.0), exponents.astype(np.int32) - _BIAS)


def mxfp4_codes(blocks: npt.NDArray[np.uint8], exponents: npt.NDArray[np.uint8]) -> GroupedCodes:
    """A matrix as gpt-oss's safetensors hold it: `blocks` [N, K / 32, 16], the even one of two floats in the low half
    of a byte, and `exponents` [N, K / 32].
    """
    floats = np.stack((blocks & 15, blocks >> 4), axis=-1)  # [N, K / 32, 16, 2]
    return GroupedCodes(
        codes=torch.from_numpy(codes_of(floats).reshape(len(blocks), -1)),
        scales=torch.from_numpy(scales_of(exponents)),
        minimums=None,
        zero=ZERO,
        bits=BITS,
        group=GROUP,
    )
