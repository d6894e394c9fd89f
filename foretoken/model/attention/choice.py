"""Which implementation reads paged keys and values: one table, the first line that a place takes by default.

`FORETOKEN_ATTENTION=NAME` takes another line, for models and trained heads alike. `strict.StrictAttention` is no line
of it: `model.strict` runs rows of other shapes through it, on any device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from foretoken.errors import ConfigError
from foretoken.kernels.launches import TRITON_DTYPES, has_triton
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KernelAttention, PagedAttention

ATTENTION_VARIABLE = "FORETOKEN_ATTENTION"
AttentionKind = type[PagedAttention | BatchedAttention | FusedAttention]


@dataclass(frozen=True)
class AttentionPlace:
    """Where attention runs; `exact_rows`: compiled kernels run all of the model (`layer_pass`)."""

    device: torch.device
    dtype: torch.dtype  # of queries, keys and values
    exact_rows: bool


@dataclass(frozen=True)
class Implementation:
    """One way to read paged keys and values: where it is taken unless another is named, and what it needs."""

    name: str
    kind: AttentionKind
    why: str
    is_default: Callable[[AttentionPlace], bool]
    runs: Callable[[AttentionPlace], bool]
    needs: str


def _runs_fused(at: AttentionPlace) -> bool:
    return at.device.type == "cuda" and at.dtype in TRITON_DTYPES and not at.exact_rows and has_triton()


def _is_exact(at: AttentionPlace) -> bool:
    return at.exact_rows


def _is_inexact(at: AttentionPlace) -> bool:
    return not at.exact_rows


_INEXACT = "a model or head whose rows the compiled kernels do not keep exact"
IMPLEMENTATIONS = (
    Implementation(
        *("exact", KernelAttention, "the bits of a row depend on its text alone"),
        *(_is_exact, _is_exact, "a model that the compiled kernels of a CPU run as a whole"),
    ),
    Implementation(
        *("segments", PagedAttention, "calls are cheap, padding costs"),
        *(lambda at: at.device.type == "cpu", _is_inexact, _INEXACT),
    ),
    Implementation(
        *("triton", FusedAttention, "one launch reads the cache as it lies, and steps are captured as graphs"),
        *(_runs_fused, _runs_fused, "a CUDA device, float16, bfloat16 or float32, and foretoken[triton]"),
    ),
    Implementation(
        *("batched", BatchedAttention, "a call costs more than padding"),
        *(lambda _: True, _is_inexact, _INEXACT),
    ),
)


def choose(
    device: torch.device, dtype: torch.dtype, exact_rows: bool = False, name: str | None = None
) -> Implementation:
    """The line called `name`; None: the first of `IMPLEMENTATIONS` that is the default there.

    Raises:
        ConfigError: no line has this name, or it does not run there.
    """
    at = AttentionPlace(device, dtype, exact_rows)
    if name is None:
        return next(one for one in IMPLEMENTATIONS if one.is_default(at))
    found = next((one for one in IMPLEMENTATIONS if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in IMPLEMENTATIONS)
        raise ConfigError(ATTENTION_VARIABLE, name, f"choose one of {names}, or leave it unset")
    if not found.runs(at):
        exact = ", exact rows" if exact_rows else ""
        remedy = f"it needs {found.needs}; this is {device.type}, {str(dtype).removeprefix('torch.')}{exact}"
        raise ConfigError(ATTENTION_VARIABLE, name, remedy)
    return found


def chosen(device: torch.device, dtype: torch.dtype, exact_rows: bool = False) -> AttentionKind:
    """What `choose` gives for the name in the environment.

    Raises:
        ConfigError: see `choose`.
    """
    return choose(device, dtype, exact_rows, os.environ.get(ATTENTION_VARIABLE) or None).kind
