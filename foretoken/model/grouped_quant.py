"""Matrices of a 16- or 32-bit checkpoint, quantised at load for the kernel of `grouped_kernel`, in groups of 32 inputs.

- int8, as llama.cpp's Q8_0: scale = max|w| / 127, codes -127..127.
- int4, as its Q4_0: the entry of largest magnitude takes the code -8. The embedding table is kept in int8, and shared
  with a tied head.

Scales are rounded to float16 before codes are chosen, so that each code is the nearest to what it then stands for. An
exact zero stays one. An input size that 32 does not divide is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.config import QUANTISED
from foretoken.model.grouped import GroupedCodes
from foretoken.model.grouped_kernel import GroupedWeight, kernel
from foretoken.model.grouped_layout import BLOCK_ROWS, codes_shape
from foretoken.model.grouped_twin import SPAN
from foretoken.model.large_pages import large_page_tensor
from foretoken.model.quant import RowBlocks, group_codes, row_codes

_ZERO = {"int8": 128, "int4": 8}
_BITS = {"int8": 8, "int4": 4}


class GroupQuantiser:
    """Turns matrices into `GroupedWeight`, some rows at a time; `dtype` is that of a table's rows.

    A matrix comes as `pieces`, see `quant.RowBlocks`.
    """

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        assert kind in QUANTISED
        self.kind, self.dtype = kind, dtype
        self._blocks = RowBlocks()
        kernel()  # compiled before the file is read, so that a machine without a compiler says so first

    def matrix(self, pieces: Sequence[Tensor]) -> GroupedWeight:
        """All pieces [n, K] as one matrix [N, K]."""
        return self._weight(pieces, self.kind)

    def table(self, pieces: Sequence[Tensor]) -> GroupedWeight:
        """All pieces [n, K] as one matrix [N, K] in int8, whose rows are read too."""
        return self._weight(pieces, "int8")

    def _weight(self, pieces: Sequence[Tensor], kind: str) -> GroupedWeight:
        num_rows, width = sum(map(len, pieces)), pieces[0].shape[1]
        blocks, groups, bits = -(-num_rows // BLOCK_ROWS), -(-width // SPAN), _BITS[kind]
        codes = large_page_tensor(codes_shape(blocks, groups, bits, SPAN), torch.uint8)
        scales = large_page_tensor((blocks, groups, BLOCK_ROWS), torch.float16)
        for start, rows in self._blocks.of(pieces):
            part = GroupedWeight.of(grouped_codes(rows, kind), self.dtype)
            place = slice(start // BLOCK_ROWS, start // BLOCK_ROWS + len(part.codes))
            codes[place], scales[place] = part.codes, part.scales
        return GroupedWeight(codes, scales, None, num_rows, width, _ZERO[kind], bits, SPAN, self.dtype)


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
