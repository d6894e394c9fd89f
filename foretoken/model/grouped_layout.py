"""Where the kernel of `grouped_kernel` finds the code of a weight.

A block is 16 outputs, a chunk 4 inputs: 64 bytes [16, 4] hold a code each, as one lane of the processor's 8-bit product
reads them. Below 8 bits the lower half of a group's chunks lies in the low nibbles of such lines and the upper half in
the high ones; with 5 or 6 bits one more line holds the bits above those, of chunk c from bit (bits - 4) * c on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.model.large_pages import large_page_tensor

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
