"""Which implementation reads paged keys and values: one table, the first line that fits is taken.

`strict.StrictAttention` is no line of it: `model.strict` runs rows of other shapes through it, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.paged import KernelAttention, PagedAttention


@dataclass(frozen=True)
class Implementation:
    """One way to read paged keys and values; `fits` is asked for the device and whether rows must be exact."""

    name: str
    kind: type[PagedAttention | BatchedAttention]
    why: str
    fits: Callable[[torch.device, bool], bool]


IMPLEMENTATIONS = (
    Implementation("exact", KernelAttention, "the bits of a row depend on its text alone", lambda _, exact: exact),
    Implementation("segments", PagedAttention, "calls are cheap, padding costs", lambda on, _: on.type == "cpu"),
    Implementation("batched", BatchedAttention, "a call costs more than padding", lambda _on, _exact: True),
)


def choose(device: torch.device, exact_rows: bool = False) -> Implementation:
    """The first of `IMPLEMENTATIONS` that fits; `exact_rows`: compiled kernels run all of the model (`layer_pass`)."""
    return next(one for one in IMPLEMENTATIONS if one.fits(device, exact_rows))
