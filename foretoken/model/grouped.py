"""Weights in groups of inputs, as GGUF files and 4-bit checkpoints hold them: integer codes, a scale and a minimum per
group.

w = scale * (code - zero) + minimum, computed in float32 in this order: that is bit for bit what the formats' own
packages compute, so nothing is quantised again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

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

    @classmethod
    def joined(cls, parts: Sequence[GroupedCodes]) -> GroupedCodes:
        """The matrix whose rows come in `parts` of one format."""
        if len(parts) == 1:
            return parts[0]

        def together(of: Callable[[Any], Tensor | None], owners: Sequence[Any]) -> Tensor | None:
            return None if of(owners[0]) is None else torch.cat([of(owner) for owner in owners])  # type: ignore[misc]

        codes = {name: together(attrgetter(name), parts) for name in ("codes", "scales", "minimums", "multiples")}
        wholes = [part.whole for part in parts]
        whole = None
        if wholes[0] is not None:
            names = [field.name for field in fields(WholeScales)]
            whole = WholeScales(**{name: together(attrgetter(name), wholes) for name in names})  # type: ignore[arg-type]
        return replace(parts[0], **codes, whole=whole)  # type: ignore[arg-type]

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
