"""Weights in groups of inputs, as GGUF files and 4-bit checkpoints hold them: integer codes, a scale and a minimum per
group.

w = scale * (code - zero) + minimum, computed in float32 in this order: that is bit for bit what the formats' own
packages compute, so nothing is quantised again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedCodes:
    """A matrix [N, K] before any kernel laid it out.

    `codes` [N, K] uint8 below 2 ** `bits`; `scales` [N, K / group] float32; `minimums` the same shape, or None for a
    format without; `zero` is the code of 0, the same for all groups (128 for Q8_0, 8 for Q4_0, 0 for Q4_K, 32 for
    Q6_K).
    """

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None
    zero: int
    bits: int
    group: int

    def dequantised(self) -> Tensor:
        """The matrix as numbers, [N, K] float32."""
        grouped = self.codes.view(len(self.codes), self.scales.shape[1], self.group).to(torch.int32) - self.zero
        full = self.scales[..., None] * grouped.to(torch.float32)
        if self.minimums is not None:
            full = full + self.minimums[..., None]
        return full.view(self.codes.shape)
