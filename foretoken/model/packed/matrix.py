"""A quantised matrix after its tensors were read: codes with a scale and a zero point per group, or FP8 with scales.

number = scale * (code - zero), in float32. A code and a zero point have 8 bits at most and scales are usually float16
or bfloat16, so the product is exact: rounded to the format of the scales it is what the formats' own packages compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.model.matrices.codes import GroupedCodes
from foretoken.model.matrices.grouped_kernel import SPAN

_NIBBLE = 4
_LOW_BITS = 0xFF  # of a float32: without them 16 significant bits are left, and the product with 8 bits is exact


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix [N, K] in codes of `bits` (4 or 8).

    `unpack(start, stop)` gives the codes of some rows, [n, K] uint8. `scales` [N, G] float32, `zeros` [N, G] uint8.
    `group` inputs that follow one another share a scale, the last group may be shorter; with `order` [K] (GPTQ's g_idx)
    the group of each input is named instead.
    """

    unpack: Callable[[int, int], Tensor]
    scales: Tensor
    zeros: Tensor
    width: int
    bits: int
    group: int
    order: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.scales)

    def numbers(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` as numbers, [n, K] float32."""
        groups = torch.arange(self.width) // self.group if self.order is None else self.order  # [K]
        away = self.unpack(start, stop).to(torch.int16) - self.zeros[start:stop].to(torch.int16)[:, groups]
        return self.scales[start:stop][:, groups] * away

    @functools.cached_property
    def why_numbers(self) -> str | None:
        """Why the kernel of `grouped_kernel` cannot take the codes; None if it can."""
        if self.order is not None:
            return "act-order: inputs of a group do not follow one another"
        if self.width % SPAN:
            return f"{self.width:,} inputs, which groups of {SPAN} do not divide"
        if self.scales.shape[1] > 1 and self.group % SPAN:
            return f"groups of {self.group}, which {SPAN} does not divide"
        if self._one_zero is None and bool((self.scales.contiguous().view(torch.int32) & _LOW_BITS).any()):
            return "zero points beside scales of more than 16 bits"
        return None

    def grouped(self, start: int, stop: int) -> GroupedCodes:
        """Rows `start` to `stop` for the kernel, the same numbers; only where `why_numbers` has no objection."""
        assert self.why_numbers is None
        scales, zeros, group = self.scales[start:stop], self.zeros[start:stop], min(self.group, self.width)
        if self.width % group:  # a short group at the end: shorter ones all along
            repeats = torch.arange(self.width // SPAN) * SPAN // group
            scales, zeros, group = scales[:, repeats], zeros[:, repeats], SPAN
        codes, zero = self.unpack(start, stop), self._one_zero
        if zero is not None:
            return GroupedCodes(codes, scales, None, zero, self.bits, group)
        multiples = -zeros.to(torch.int8) if self.bits == _NIBBLE else None  # a zero point of 8 bits may be 255
        # exact, as its sum with scale * code is
        return GroupedCodes(codes, scales, -(scales * zeros), 0, self.bits, group, multiples=multiples)

    @functools.cached_property
    def _one_zero(self) -> int | None:
        """The zero point if all groups have the same."""
        first = int(self.zeros.flatten()[0])
        return first if bool((self.zeros == first).all()) else None


@dataclass(frozen=True)
class ScaledMatrix:
    """A matrix [N, K] in FP8 whose blocks of `block` rows and inputs have a scale each: `scales` [blocks, blocks]."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
    why_numbers = "FP8"

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.values)

    def numbers(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` as numbers, [n, K] float32."""
        rows, columns = torch.arange(start, stop) // self.block[0], torch.arange(self.values.shape[1]) // self.block[1]
        return self.values[start:stop].to(torch.float32) * self.scales[rows][:, columns]


def nibbles_or_bytes(words: Tensor, bits: int) -> Tensor:
    """The codes of 4 or 8 bits in `words` [R, W] int32, lowest bits first: [R, W * 32 / bits] uint8."""
    found = words.contiguous().view(torch.uint8)  # [R, 4 W]
    if bits == 8:
        return found
    return torch.stack((found & 15, found >> 4), dim=-1).flatten(1)
