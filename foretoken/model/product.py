"""Matrices that a compiled function multiplies by: `kernels/grouped.cpp` or `kernels/dense.cpp`."""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

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
    """Products of one input as one whose outputs follow one another; None where one is missing, or they are of
    different functions.
    """
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


class CompiledWeight(ABC):
    """A weight that knows its `Product`; a copy makes its own, because a product holds addresses."""

    @functools.cached_property
    def product(self) -> Product | None:
        """What multiplies by this weight, None where nothing can be compiled."""
        return self._compiled()

    @abstractmethod
    def _compiled(self) -> Product | None:
        """See `product`."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "product"}


def array_of(kind: type[_Fields], parts: Sequence[_Fields]) -> ctypes.Array[_Fields]:
    """`parts` one behind the other."""
    return (kind * len(parts))(*parts)
