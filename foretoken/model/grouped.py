"""Weights in groups of inputs, as GGUF files and 4-bit checkpoints hold them: integer codes, a scale and a minimum per
group.

w = scale * (code - zero) + minimum, computed in float32 in this order: that is bit for bit what the formats' own
packages compute, so nothing is quantised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def reordered(self, change: Callable[[Tensor], Tensor]) -> GroupedCodes:
        """The matrix whose rows `change` [N, ...] -> [N, ...] puts into another order."""

        def changed(own: Tensor | None) -> Tensor | None:
            return None if own is None else change(own)

        whole = self.whole
        if whole is not None:
            whole = WholeScales(
                change(whole.scales),
                change(whole.super_scales),
                changed(whole.minimums),
                changed(whole.super_minimums),
            )
        scales, minimums, multiples = change(self.scales), changed(self.minimums), changed(self.multiples)
        return GroupedCodes(change(self.codes), scales, minimums, self.zero, self.bits, self.group, whole, multiples)
