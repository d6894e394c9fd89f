"""The arithmetic of `kernels/grouped.cpp` in torch's own operations: the same bits, slowly.

Sums of products inside a group are integers below 2^24, which float32 holds exactly in any order of summation, so an
ordinary matrix product computes them. All else is one rounded operation at a time, in the kernel's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.model.grouped_layout import BLOCK_ROWS, unpacked

if TYPE_CHECKING:
    from foretoken.model.grouped_kernel import GroupedWeight

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
    numbers = (
        stored.permute(1, 2, 4, 0, 3).reshape(stored.shape[1], group, -1).float() - weight.zero
    )  # [groups, group, N']
    inputs = codes.view(len(codes), -1, group).transpose(0, 1)  # [groups, T, group]
    dots, sums = torch.bmm(inputs, numbers), inputs.sum(2)  # [groups, T, N'], [groups, T]
    scales, minimums = (None if own is None else _by_group(own) for own in weight.numbers(blocks))
    assert scales is not None
    total = torch.zeros(len(codes), scales.shape[1])
    for index in range(len(scales)):
        part = scales[index] * dots[index]
        if minimums is not None:
            part = part + minimums[index] * sums[index, :, None]
        total = total + part * x_scales[:, index * group // SPAN, None]
    return total


def _by_group(numbers: Tensor) -> Tensor:
    """`[B, groups, 16]` as `[groups, 16 B]`."""
    return numbers.transpose(0, 1).reshape(numbers.shape[1], len(numbers) * BLOCK_ROWS)
