"""Matrices of a 16- or 32-bit checkpoint as codes in 8 or 4 bits and scales; which formats can run where.

All forms are symmetric, which keeps an exact zero exact: a scale for each row, or, for the kernel of `grouped_kernel`,
groups of 32 inputs:

- int8, as llama.cpp's Q8_0: scale = max|w| / 127, codes -127..127.
- int4, as its Q4_0: the entry of largest magnitude takes the code -8. The embedding table is kept in int8, and shared
  with a tied head.

Scales of groups are rounded to float16 before codes are chosen, so that each code is the nearest to what it then stands
for. An input size that 32 does not divide is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.config import QUANTISED
from foretoken.errors import InputError, warn
from foretoken.kernels.build import BuildError, KernelWarning, built
from foretoken.model.matrices.codes import BLOCK_ROWS, Allocate, GroupedCodes, codes_shape, large_page_tensor
from foretoken.model.matrices.grouped_kernel import SOURCE, SPAN, GroupedWeight, kernel, load

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)

# Rows that are quantised at a time: a multiple of the kernel's blocks of 16, so that pieces fit together.
_BLOCK_ROWS = 256


def check_quant(kind: str, dtype: torch.dtype, device: torch.device, field: str = "weights") -> None:
    """Refuse a weight format that nothing here multiplies; `field` is the option that asks for it.

    Raises:
        InputError: unknown, or not with activations of this dtype or on this device.
    """
    if kind not in QUANTISED:
        raise InputError(field, kind, f"choose one of auto, {', '.join(QUANTISED)}")
    if device.type != "cpu":
        raise InputError(
            field, kind, f"runs on the CPU only and this model goes to {device}; load it in bfloat16 there"
        )
    if dtype not in ACTIVATIONS:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            field, kind, f"does not go with dtype={name!r}; take bfloat16, float16 or float32 for one of them"
        )


def drafts_at_speed(kind: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a drafter's weights should be held in `kind`, asked for by `draft_dtype`; a warning where they should
    not, because no kernel can be compiled: drafting with the kernel's twin would cost many times what it saves.
    """
    check_quant(kind, dtype, device, field="draft_dtype")
    error = _build_error()
    if error is not None:
        warn(
            KernelWarning(f"a drafter in {kind} runs with its weights as they are stored, not quantised: {error}"),
            stacklevel=3,
        )
    return error is None


def head_format(target_format: str, itemsize: int, device: torch.device) -> str:
    """What `draft_dtype="auto"` holds a trained head in, beside a target whose matrices are in `target_format` and
    whose rows take `itemsize` bytes a number: the target's number of bits; "int8" beside 16 bits on a CPU, where a pass
    of the head takes as long as reading its weights; otherwise "auto", as they are stored.
    """
    if target_format in QUANTISED:
        return target_format
    return "int8" if itemsize == 2 and device.type == "cpu" and _build_error() is None else "auto"


def _build_error() -> BuildError | None:
    """Why there is no compiled kernel; None where there is one."""
    try:
        load(built(SOURCE))
    except BuildError as error:
        return error
    return None


def row_codes(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn rows of `full` [N, K] float32, in place, into codes in -127..127; the scales [N], in `dtype`."""
    scales = _scales(torch.linalg.vector_norm(full, float("inf"), dim=1) / 127, dtype)
    full.div_(scales[:, None].float()).round_().clamp_(-127, 127)
    return scales


def group_codes(full: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Turn groups of `full` [N, K] float32, in place, into codes in -8..7; the scales [N, K / group], in `dtype`."""
    groups = full.view(len(full), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scales = _scales(torch.where(high > -low, high, low) / -8, dtype)
    groups.div_(scales[..., None].float()).round_().clamp_(-8, 7)
    return scales


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """`wanted` rounded to `dtype`; 1 where nothing is left of it, since all codes are 0 there."""
    scales = wanted.to(dtype)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


_ZERO = {"int8": 128, "int4": 8}
_BITS = {"int8": 8, "int4": 4}


class GroupQuantiser:
    """Turns matrices into `GroupedWeight`; `dtype` is that of a table's rows.

    A matrix comes as `pieces`, 2-D tensors of equal width whose rows follow one another; they may be views of a mapped
    file. They are converted some rows at a time in memory that is used again: besides the codes little is allocated,
    and nothing that would leave holes between matrices when it goes.
    """

    def __init__(self, kind: str, dtype: torch.dtype, allocate: Allocate = large_page_tensor) -> None:
        assert kind in QUANTISED
        self.kind, self.dtype, self._allocate = kind, dtype, allocate
        self._scratch = torch.empty(0, dtype=torch.float32)
        kernel()  # compiled before the file is read, so that a machine without a compiler says so first

    def matrix(self, pieces: Sequence[Tensor], is_table: bool = False) -> GroupedWeight:
        """All pieces [n, K] as one matrix [N, K]; in int8 where it is a table whose rows are read too."""
        kind = "int8" if is_table else self.kind
        num_rows, width = sum(map(len, pieces)), pieces[0].shape[1]
        blocks, groups, bits = -(-num_rows // BLOCK_ROWS), -(-width // SPAN), _BITS[kind]
        codes = self._allocate(codes_shape(blocks, groups, bits, SPAN), torch.uint8)
        scales = self._allocate((blocks, groups, BLOCK_ROWS), torch.float16)
        for start, rows in self._row_blocks(pieces):
            part = GroupedWeight.of(grouped_codes(rows, kind), self.dtype)
            place = slice(start // BLOCK_ROWS, start // BLOCK_ROWS + len(part.codes))
            codes[place], scales[place] = part.codes, part.scales
        return GroupedWeight(codes, scales, None, num_rows, width, _ZERO[kind], bits, SPAN, self.dtype)

    def _row_blocks(self, pieces: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first row, the rows in float32), `_BLOCK_ROWS` at a time, each valid until the next."""
        width, start, filled = pieces[0].shape[1], 0, 0
        if self._scratch.numel() < _BLOCK_ROWS * width:
            self._scratch = torch.empty(_BLOCK_ROWS * width, dtype=torch.float32)
        block = self._scratch[: _BLOCK_ROWS * width].view(_BLOCK_ROWS, width)
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


def grouped_codes(rows: Tensor, kind: str) -> GroupedCodes:
    """`rows` [n, K] float32 as codes and scales, K filled up to whole groups."""
    full = F.pad(rows, (0, -rows.shape[1] % SPAN))
    if full is rows:
        full = rows.clone()  # codes are made in place
    if kind == "int8":
        scales = row_codes(full.view(-1, SPAN), torch.float16).view(len(full), -1)
    else:
        scales = group_codes(full, SPAN, torch.float16)
    codes = (full + _ZERO[kind]).to(torch.uint8)
    return GroupedCodes(codes, scales.float(), None, _ZERO[kind], _BITS[kind], SPAN)


def grouped_bytes(kind: str, num_rows: int, width: int) -> int:
    """Memory of a matrix [N, K] in the format `kind`."""
    padded = -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS
    return padded * -(-width // SPAN) * (SPAN * _BITS[kind] // 8 + 2)
