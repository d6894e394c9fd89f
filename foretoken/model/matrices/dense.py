"""Matrices that a compiled function multiplies by, and those in bfloat16: `kernels/dense.cpp`.

oneDNN's kernels read a bf16 matrix for one or two rows at half of the memory's bandwidth on processors without AMX;
this one reads it at full speed for up to about eight rows (benchmarks/). A row's result does not depend on the rows
beside it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.build import loaded, opened
from foretoken.model.matrices.codes import Allocate, large_page_tensor
from foretoken.model.row_kernels import FLAGS

# x [T, K], num_rows, width, matrices, their number, out [T, N], N, whether both are bfloat16, threads
ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int),
)
Multiply = Callable[..., bool]
_Fields = TypeVar("_Fields", bound=ctypes.Structure)


class ProductFields(ctypes.Structure):
    """`foretoken_product` of `kernels/decoder.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "parts", "bias")),
        *((name, ctypes.c_int64) for name in ("width", "num_outputs")),
        ("num_parts", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Product:
    """A function with the matrices it multiplies by, as its library takes them; outputs of `parts` follow one another.

    Holds addresses: it is of use as long as the weights that made it.
    """

    function: Multiply
    parts: ctypes.Array[Any]
    width: int
    num_outputs: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, plus `bias` [N], rounded once: [T, N].

        Raises:
            MemoryError: no memory for the rows as the function wants them.
        """
        is_bf16 = bias is None and x.dtype == torch.bfloat16  # it reads and writes those itself
        full = (x if is_bf16 else x.to(torch.float32)).contiguous()
        out = torch.empty(len(full), self.num_outputs, dtype=full.dtype)
        if len(full) and not self.function(
            *(full.data_ptr(), len(full), self.width, self.parts, len(self.parts)),
            *(out.data_ptr(), self.num_outputs, is_bf16, torch.get_num_threads()),
        ):
            raise MemoryError(f"no memory for the codes of {len(full)} rows of activations; run fewer rows at a time")
        if bias is not None:
            out += bias
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def fields(self, bias: Tensor | None) -> ProductFields:
        """What a compiled pass over whole layers takes."""
        address = ctypes.cast(self.function, ctypes.c_void_p)  # type: ignore[arg-type]
        parts = ctypes.addressof(self.parts)
        at = None if bias is None else bias.data_ptr()
        return ProductFields(address.value, parts, at, self.width, self.num_outputs, len(self.parts))


def merged_product(products: Sequence[Product | None]) -> Product | None:
    """Products of one input as one, outputs in sequence; None where one is missing, or their functions differ."""
    first = products[0]
    if first is None or len(products) == 1:
        return first
    parts = list[Any]()
    num_outputs = 0
    for one in products:
        if one is None or one.function is not first.function or one.width != first.width:
            return None
        parts += one.parts
        num_outputs += one.num_outputs
    return Product(first.function, array_of(type(parts[0]), parts), first.width, num_outputs)


class CompiledWeight:
    """A weight that keeps its `product`; a copy makes its own, because a product holds addresses."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "product"}


def array_of(kind: type[_Fields], parts: Sequence[_Fields]) -> ctypes.Array[_Fields]:
    """`parts` one behind the other."""
    return (kind * len(parts))(*parts)


SOURCE = Path(__file__).resolve().parents[2] / "kernels" / "dense.cpp"
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
    def of(cls, weight: Tensor, allocate: Allocate = large_page_tensor) -> DenseWeight:
        """`weight` [N, K] bfloat16 in this layout."""
        num_rows, width = weight.shape
        spare, missing = -num_rows % BLOCK_ROWS, width % 2
        full = F.pad(weight, (0, missing, 0, spare)) if spare or missing else weight
        split = full.view(-1, BLOCK_ROWS, full.shape[1] // 2, 2).transpose(1, 2)  # [blocks, pairs, 16, 2]
        return cls(allocate(split.shape, split.dtype).copy_(split), num_rows, width)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `layers.PackedWeight`; `x` in float32 is rounded to bfloat16 first."""
        product = self.product
        assert product is not None, "made where the kernel runs"
        return product(x, bias)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self.weights.nbytes

    @functools.cached_property
    def product(self) -> Product | None:
        """See `layers.PackedWeight`; None where nothing can be compiled."""
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
    """The compiled product, None where there is none (the first time with a warning)."""
    return loaded(SOURCE, load, "plain matrices are multiplied by torch, slower for a few rows", FLAGS)


def load(path: Path) -> Multiply:
    """The product of the compiled library `path`."""
    function = opened(path, "foretoken_dense_interface", _INTERFACE).foretoken_dense_multiply
    function.argtypes, function.restype = ARGUMENTS, ctypes.c_bool
    return function


def has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16, which oneDNN does for one row as fast as for 16."""
    return torch.cpu._is_amx_tile_supported()
