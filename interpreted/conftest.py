"""Kernels for a GPU run on CPU tensors here: Triton reads this variable when a kernel is defined."""

import gc
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

torch.set_num_threads(1)


_INSTRUCTION_CHANNELS = 16  # that a GPU's matrix instruction adds to its accumulator


def _dot(_builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """The interpreter's product, each row by itself and instruction by instruction as on a GPU: what numpy's library
    gives for a row depends on the row's place among the others on some processors.
    """
    total, left, right = d.data, a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    for first in range(0, left.shape[1], _INSTRUCTION_CHANNELS):
        part = slice(first, first + _INSTRUCTION_CHANNELS)
        total = total + np.einsum("ik,kj->ij", np.ascontiguousarray(left[:, part]), np.ascontiguousarray(right[part]))
    return TensorHandle(total, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot


def pytest_collection_finish() -> None:
    """The interpreter makes many small objects: the garbage collector need not go through torch again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
