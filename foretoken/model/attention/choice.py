"""Which implementation reads paged keys and values, and why.

`FORETOKEN_ATTENTION=NAME` takes another one, for models and trained heads alike. `strict.StrictAttention` is none of
them: `model.strict` runs rows of other shapes through it, on any device.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from foretoken.errors import ConfigError
from foretoken.kernels.launches import TRITON_DTYPES, has_triton
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KernelAttention, PagedAttention

ATTENTION_VARIABLE = "FORETOKEN_ATTENTION"
AttentionKind = type[PagedAttention | BatchedAttention | FusedAttention]


class Implementation(NamedTuple):
    """One way to read paged keys and values, and what it needs."""

    name: str
    kind: AttentionKind
    needs: str


_INEXACT = "a model or head whose rows the compiled kernels do not keep exact"
EXACT = Implementation("exact", KernelAttention, "a model that the compiled kernels of a CPU run as a whole")
SEGMENTS = Implementation("segments", PagedAttention, _INEXACT)
TRITON = Implementation("triton", FusedAttention, "a CUDA device, float16, bfloat16 or float32, and foretoken[triton]")
BATCHED = Implementation("batched", BatchedAttention, _INEXACT)
IMPLEMENTATIONS = (EXACT, SEGMENTS, TRITON, BATCHED)


def _that_run(device: torch.device, dtype: torch.dtype, exact_rows: bool) -> tuple[Implementation, ...]:
    """Those that run there, the default first."""
    if exact_rows:  # the bits of a row depend on its text alone
        return (EXACT,)
    if device.type == "cpu":  # calls are cheap, padding costs
        return SEGMENTS, BATCHED
    if device.type == "cuda" and dtype in TRITON_DTYPES and has_triton():
        return TRITON, BATCHED, SEGMENTS  # one launch reads the cache as it lies, and steps are captured as graphs
    return BATCHED, SEGMENTS  # a call costs more than padding


def choose(
    device: torch.device, dtype: torch.dtype, exact_rows: bool = False, name: str | None = None
) -> Implementation:
    """The implementation called `name`, None: the default, on `device` for queries, keys and values of `dtype`;
    `exact_rows`: compiled kernels run all of the model (`layer_pass`).

    Raises:
        ConfigError: there is none of this name, or it does not run there.
    """
    run = _that_run(device, dtype, exact_rows)
    if name is None:
        return run[0]
    found = next((one for one in IMPLEMENTATIONS if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in IMPLEMENTATIONS)
        raise ConfigError(ATTENTION_VARIABLE, name, f"choose one of {names}, or leave it unset")
    if found not in run:
        exact = ", exact rows" if exact_rows else ""
        remedy = f"it needs {found.needs}; this is {device.type}, {str(dtype).removeprefix('torch.')}{exact}"
        raise ConfigError(ATTENTION_VARIABLE, name, remedy)
    return found


def chosen(device: torch.device, dtype: torch.dtype, exact_rows: bool = False) -> AttentionKind:
    """What `choose` gives for the name in the environment."""
    return choose(device, dtype, exact_rows, os.environ.get(ATTENTION_VARIABLE) or None).kind
