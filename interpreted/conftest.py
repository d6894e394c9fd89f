"""Kernels for a GPU run on CPU tensors here: Triton reads this variable when a kernel is defined."""

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

torch.set_num_threads(1)


def _dot(_builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """The interpreter's product, each row by itself as on a GPU: what numpy's library gives for a row depends on the
    row's place among the others on some processors.
    """
    product = np.einsum("ik,kj->ij", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    return TensorHandle(product + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot


def pytest_collection_finish() -> None:
    """The interpreter makes many small objects: the garbage collector need not go through torch again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
