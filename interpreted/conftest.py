"""Kernels for a GPU run on CPU tensors here: Triton reads this variable when a kernel is defined."""

import gc
import os

import torch

os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """The interpreter makes many small objects: the garbage collector need not go through torch again and again."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
