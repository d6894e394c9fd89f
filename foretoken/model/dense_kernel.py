"""Matrices in bfloat16, multiplied by a kernel that is compiled on first use: `kernels/dense.cpp`.

oneDNN's kernels read a bf16 matrix for one or two rows at half of the memory's bandwidth on processors without AMX;
this one reads it at full speed for up to about eight rows (benchmarks/). A row's result does not depend on the rows
beside it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import BuildError, built, opened
from foretoken.model.large_pages import large_page_tensor
from foretoken.model.product import ARGUMENTS, CompiledWeight, Multiply, Product, array_of
from foretoken.model.row_kernels import FLAGS

SOURCE = Path(__file__).resolve().parent.parent / "kernels" / "dense.cpp"
BLOCK_ROWS = 16  # outputs of a block
_INTERFACE = 1  # of the compiled library: what its function takes


class _DenseMatrix(ctypes.Structure):
    """`foretoken_dense` of the kernel."""

    _fields_ = (("weights", ctypes.c_void_p), ("num_outputs", ctypes.c_int64))


@dataclass(frozen=True)
class DenseWeight(CompiledWeight):
    """A matrix [N, K] in the kernel's layout: `weights` [blocks, pairs, 16, 2] bfloat16, with zeros up to whole blocks
    of outputs and pairs of inputs.
    """

    weights: Tensor
    num_rows: int
    width: int

    @classmethod
    def of(cls, weight: Tensor) -> DenseWeight:
        """`weight` [N, K] bfloat16 in this layout."""
        num_rows, width = weight.shape
        spare, missing = -num_rows % BLOCK_ROWS, width % 2
        full = F.pad(weight, (0, missing, 0, spare)) if spare or missing else weight
        split = full.view(-1, BLOCK_ROWS, full.shape[1] // 2, 2).transpose(1, 2)  # [blocks, pairs, 16, 2]
        return cls(large_page_tensor(split.shape, split.dtype).copy_(split), num_rows, width)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `layers.PackedWeight`; `x` in float32 is rounded to bfloat16 first."""
        product = self.product
        assert product is not None, "made where the kernel runs"
        return product(x, bias)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.weights.nbytes

    def _compiled(self) -> Product | None:
        function = kernel()
        if function is None:
            return None
        matrix = _DenseMatrix(self.weights.data_ptr(), self.num_rows)
        return Product(function, array_of(_DenseMatrix, [matrix]), self.width, self.num_rows)


def dense_bytes(num_rows: int, width: int) -> int:
    """Memory of a matrix [N, K] in this layout."""
    return -(-num_rows // BLOCK_ROWS) * BLOCK_ROWS * -(-width // 2) * 2 * torch.bfloat16.itemsize


@functools.cache
def kernel() -> Multiply | None:
    """The compiled product, None where there is none: torch multiplies by plain matrices too."""
    try:
        return load(built(SOURCE, FLAGS))
    except BuildError:
        return None


def load(path: Path) -> Multiply:
    """The product of the compiled library `path`.

    Raises:
        BuildError: it cannot be loaded here, or is none of ours.
    """
    function = opened(path, "foretoken_dense_interface", _INTERFACE).foretoken_dense_multiply
    function.argtypes, function.restype = ARGUMENTS, ctypes.c_bool
    return function


def has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16, which oneDNN does for one row as fast as for 16."""
    return torch.cpu._is_amx_tile_supported()
