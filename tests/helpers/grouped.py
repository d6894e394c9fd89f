"""Matrices in the shapes of the formats that people have, and of some that the kernel takes beside them, with codes
and scales drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from foretoken.model.matrices.codes import SUPER, GroupedCodes, WholeScales


@dataclass(frozen=True)
class GroupFormat:
    """What `GroupedCodes` of a format look like; `half`: scales and minimums are float16 numbers, `whole`: products of
    whole numbers; `zero_points`: minimums are whole multiples of scales.
    """

    bits: int
    zero: int
    group: int = 32
    has_minimums: bool = False
    half: bool = False
    whole: bool = False
    zero_points: bool = False


FORMATS = {
    "Q8_0": GroupFormat(8, 128, half=True),
    "Q4_0": GroupFormat(4, 8, half=True),
    "Q4_1": GroupFormat(4, 0, has_minimums=True, half=True),
    "Q5_1": GroupFormat(5, 0, has_minimums=True, half=True),
    "Q4_K": GroupFormat(4, 0, has_minimums=True, whole=True),
    "Q5_K": GroupFormat(5, 0, has_minimums=True, whole=True),
    "Q6_K": GroupFormat(6, 32, group=16, whole=True),
    "4 bits of 16": GroupFormat(4, 8, group=16),
    "5 bits of 16": GroupFormat(5, 16, group=16, has_minimums=True),
    "7 bits of 32": GroupFormat(7, 64),
    "8 bits of 16": GroupFormat(8, 128, group=16, has_minimums=True),
    "AWQ": GroupFormat(4, 8, group=128, half=True),
    "GPTQ": GroupFormat(4, 0, group=128, half=True, zero_points=True),
    "zero points of 32": GroupFormat(4, 0, zero_points=True),
}


def grouped(name: str, num_rows: int, width: int, seed: int = 0) -> GroupedCodes:
    """A matrix [N, K] of one of `FORMATS`, with every code there is."""
    form, generator = FORMATS[name], torch.Generator().manual_seed(seed)
    groups = width // form.group

    def numbers() -> torch.Tensor:
        drawn = torch.randn(num_rows, groups, generator=generator) * 0.01
        return drawn.half().float() if form.half else drawn

    codes = torch.randint(2**form.bits, (num_rows, width), generator=generator, dtype=torch.uint8)
    codes.view(-1)[: 2**form.bits] = torch.arange(2**form.bits, dtype=torch.uint8)[: codes.numel()]
    if form.zero_points:
        scales, zeros = numbers(), torch.randint(17, (num_rows, groups), generator=generator)
        minimums, multiples = -(scales * zeros), -zeros.to(torch.int8)
        return GroupedCodes(codes, scales, minimums, form.zero, form.bits, form.group, multiples=multiples)
    if not form.whole:
        return GroupedCodes(
            codes, numbers(), numbers() if form.has_minimums else None, form.zero, form.bits, form.group
        )

    def products() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own = torch.randint(-128, 128, (num_rows, groups), generator=generator).to(torch.int8)
        shared = (torch.randn(num_rows, width // SUPER, generator=generator) * 0.001).half()
        return shared.float().repeat_interleave(SUPER // form.group, 1) * own.float(), own, shared

    scales, *own_scales = products()
    minimums, *own_minimums = products() if form.has_minimums else (None, None, None)
    whole = WholeScales(*own_scales, *own_minimums)
    return GroupedCodes(codes, scales, minimums, form.zero, form.bits, form.group, whole)
