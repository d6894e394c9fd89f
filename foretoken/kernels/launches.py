"""Whether rows of a tensor are computed by Triton kernels (`row_triton`): on a CUDA device, while answering.

Without them torch's operations do the same, equal up to rounding: in training, in float64, where Triton is missing.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def launches_for(x: Tensor) -> ModuleType | None:
    """The module `row_triton`, if its kernels can take `x` here."""
    if x.device.type != "cuda" or x.dtype not in TRITON_DTYPES or not torch.is_inference_mode_enabled():
        return None
    return _row_triton() if has_triton() else None


@functools.cache
def _row_triton() -> ModuleType:
    from foretoken.kernels import row_triton  # needs triton

    return row_triton
