"""The experts of a layer in one call: `kernels/experts.h`.

A step over one row with 8 of 128 experts would otherwise be some forty small operations a layer, and a step over eight
rows would read an expert that several of them go to several times. The call groups the rows by expert, reads the
weights of each expert once, and shares the experts out among the threads. A row's result does not depend on the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.model.expert_config import ExpertsConfig
from foretoken.model.layers import Linear
from foretoken.model.matrices.dense import ProductFields, array_of
from foretoken.model.row_kernels import RowKernels


class ExpertsFields(ctypes.Structure):
    """`foretoken_experts`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "router", "router_bias", "shared_gate")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_active", "hidden_size")),
        *((name, ctypes.c_int32) for name in ("has_shared", "normalises", "clamps")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    )


@dataclass(frozen=True)
class ExpertParts:
    """Weights of one layer's experts, a shared one last; `router` [E, D], `router_bias` [E], `shared_gate` [1, D]."""

    config: ExpertsConfig
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    router: Tensor
    router_bias: Tensor | None
    shared_gate: Tensor | None


@dataclass(frozen=True)
class ExpertTable:
    """`fields` for the kernel: addresses in what is `held`."""

    fields: ExpertsFields
    held: tuple[object, ...]

    @property
    def num_slots(self) -> int:
        """Experts that a row goes to, the shared one included."""
        return int(self.fields.num_active) + int(self.fields.has_shared)


class ExpertStack(Protocol):
    """The experts of a layer, as the call takes them."""

    def parts(self) -> ExpertParts:
        """Their weights."""

    def weight_marks(self) -> tuple[object, ...]:
        """Others than before once weights were replaced."""


def expert_table(parts: ExpertParts, dtype: torch.dtype) -> ExpertTable | None:
    """What the kernel takes for rows of `dtype`; None: a matrix has no product of ours, or a table is not float32."""
    config = parts.config
    linears = (*parts.gate_up, *parts.down)
    products = [None if linear.packed is None else linear.packed.product for linear in linears]
    tables = (parts.router, parts.router_bias, parts.shared_gate)
    is_float = all(table is None or table.dtype == torch.float32 for table in tables)
    if not is_float or any(linear.bias is not None and linear.bias.dtype != dtype for linear in linears):
        return None
    rows = [product.fields(linear.bias) for product, linear in zip(products, linears, strict=True) if product]
    if len(rows) < len(linears):
        return None
    half = len(parts.gate_up)
    gate_up, down = array_of(ProductFields, rows[:half]), array_of(ProductFields, rows[half:])
    own = tuple(None if table is None else table.detach().contiguous() for table in tables)
    clamped = config.clamped
    fields = ExpertsFields(
        *(ctypes.addressof(gate_up), ctypes.addressof(down)),
        *(None if table is None else table.data_ptr() for table in own),
        *(config.num_experts, config.num_active, parts.router.shape[1]),
        *(half > config.num_experts, config.normalises, clamped is not None),
        *((clamped.limit, clamped.alpha) if clamped is not None else (0.0, 0.0)),
    )
    weights = [(linear.packed, linear.bias) for linear in linears]
    return ExpertTable(fields, (gate_up, down, own, products, weights))


def run_experts(kernels: RowKernels, stack: ExpertStack, x: Tensor) -> Tensor | None:
    """`x` [T, D] through the experts, [T, D]; None where a part of them has no kernel here.

    Raises:
        MemoryError: no memory for what lies between two operations.
    """
    table = _table(stack, x.dtype)
    if table is None:
        return None
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    if not kernels.library.foretoken_run_experts(
        *(ctypes.byref(table.fields), x.data_ptr(), out.data_ptr(), len(x)),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    ):
        raise MemoryError(f"no memory for the experts of {len(x)} rows; run fewer rows at a time")
    return out


def route(kernels: RowKernels, table: ExpertTable, x: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of each row, see `Experts.route`, as the kernel fills them: [T, S] int32 and [T, S] float32.

    Raises:
        MemoryError: no memory for the scores.
    """
    x = x.contiguous()
    chosen = torch.empty(len(x), table.num_slots, dtype=torch.int32)
    weights = torch.empty(len(x), table.num_slots, dtype=torch.float32)
    if not kernels.library.foretoken_route(
        *(ctypes.byref(table.fields), x.data_ptr(), chosen.data_ptr(), weights.data_ptr(), len(x)),
        *(x.dtype == torch.bfloat16, torch.get_num_threads()),
    ):
        raise MemoryError(f"no memory for the scores of {len(x)} rows; run fewer rows at a time")
    return chosen, weights


_TABLES: WeakKeyDictionary[ExpertStack, tuple[tuple[object, ...], ExpertTable | None]] = WeakKeyDictionary()


def _table(stack: ExpertStack, dtype: torch.dtype) -> ExpertTable | None:
    """The table of `stack`, made once for its weights."""
    marks = (*stack.weight_marks(), dtype)
    kept = _TABLES.get(stack)
    if kept is None or any(one is not other for one, other in zip(kept[0], marks, strict=True)):
        _TABLES[stack] = kept = (marks, expert_table(stack.parts(), dtype))
    return kept[1]
