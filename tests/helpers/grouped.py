"""Matrices in the shapes of the formats that people have, with codes and scales drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretoken.model.grouped import GroupedCodes


@dataclass(frozen=True)
class GroupFormat:
    """What `GroupedCodes` of a format look like; `half`: scales and minimums are float16 numbers."""

    bits: int
    zero: int
    group: int = 32
    has_minimums: bool = False
    half: bool = False


FORMATS = {
    "Q8_0": GroupFormat(8, 128, half=True),
    "Q4_0": GroupFormat(4, 8, half=True),
    "Q4_1": GroupFormat(4, 0, has_minimums=True, half=True),
    "Q4_K": GroupFormat(4, 0, has_minimums=True),
    "Q5_K": GroupFormat(5, 0, has_minimums=True),
    "Q6_K": GroupFormat(6, 32, group=16),
    "AWQ": GroupFormat(4, 8, group=128, half=True),
}


def grouped(name: str, num_rows: int, width: int, seed: int = 0) -> GroupedCodes:
    """A matrix [N, K] of one of `FORMATS`, with every code there is."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        drawn = torch.randn(num_rows, width // form.group, generator=generator) * 0.01
        return drawn.half().float() if form.half else drawn

    codes = torch.randint(2**form.bits, (num_rows, width), generator=generator, dtype=torch.uint8)
    codes.view(-1)[: 2**form.bits] = torch.arange(2**form.bits, dtype=torch.uint8)[: codes.numel()]
    return GroupedCodes(codes, numbers(), numbers() if form.has_minimums else None, form.zero, form.bits, form.group)
