"""Whether rows of a tensor are computed by Triton kernels (`row_triton`): on a CUDA device, while answering.

Without them torch's operations do the same, equal up to rounding: in training, in float64, where Triton is missing.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

MAX_PRODUCT_ROWS = 16  # with more, a library is faster: measured on an H200
PRODUCT_DTYPES = (torch.float16, torch.bfloat16)
TRITON_DTYPES = (*PRODUCT_DTYPES, torch.float32)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def launches_for(x: Tensor) -> ModuleType | None:
    """The module `row_triton`, if its kernels can take `x` here."""
    if x.device.type != "cuda" or x.dtype not in TRITON_DTYPES or not torch.is_inference_mode_enabled():
        return None
    return _row_triton() if has_triton() else None


def products_for(x: Tensor, weight: Tensor, is_exact: bool = False) -> ModuleType | None:
    """The module `product_triton`, if its kernels multiply `x` [T, K] by `weight` [N, K] here: up to `MAX_PRODUCT_ROWS`
    rows, where reading the matrix is what takes time, and any number if a row's bits shall not depend on it.
    """
    if launches_for(x) is None or x.dtype not in PRODUCT_DTYPES or weight.dtype != x.dtype:
        return None
    return _product_triton() if is_exact or len(x) <= MAX_PRODUCT_ROWS else None


@functools.cache
def _product_triton() -> ModuleType:
    from foretoken.kernels import product_triton  # needs triton

    return product_triton


@functools.cache
def _row_triton() -> ModuleType:
    from foretoken.kernels import row_triton  # needs triton

    return row_triton
