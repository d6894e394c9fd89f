"""The parts of a decoder layer that know nothing about sequences: linear, norm, MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.kernels.launches import launches_for, products_for
from foretoken.model.architecture import Activation, NormConfig
from foretoken.model.matrices.codes import Allocate, large_page_tensor
from foretoken.model.matrices.dense import DenseWeight, Product, dense_bytes, has_amx
from foretoken.model.matrices.dense import kernel as dense_kernel
from foretoken.model.row_kernels import kernels_for
from foretoken.model.sharding import Collective, SingleRank

# Row count that oneDNN lays packed weights out for. Decode and verify passes hold 1-16 rows; measured flat over 1-8
# (benchmarks/), and prefill loses nothing against the plain layout.
_PACK_ROWS = 8


class PackedWeight(Protocol):
    """A matrix [N, K] in a form that only its own kernel reads."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [T, K] times the transpose, plus `bias` [N]: [T, N]."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        ...

    @property
    def product(self) -> Product | None:
        """What a compiled pass over whole layers multiplies with; None: nothing of ours."""
        ...


class PackedTable(PackedWeight, Protocol):
    """A packed matrix whose rows can be read."""

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` [T] as numbers, [T, K]."""
        ...


class Linear(nn.Module):
    """`x @ weight.T + bias`; the weight is a plain parameter, or `packed` once `pack` or `hold` replaced it."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | None = None
        self.keeps_rows_exact = False  # on a GPU: a row's bits do not depend on the number of rows, however many

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, in] -> [T, out]."""
        if self.packed is not None:
            return self.packed.multiply(x, self.bias)
        assert self.weight is not None
        products = products_for(x, self.weight, self.keeps_rows_exact)
        if products is not None:
            product: Tensor = products.product(x, self.weight, self.bias)
            return product
        return F.linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, out] plus the product with `x` [T, in]."""
        products = None if self.weight is None else products_for(x, self.weight, self.keeps_rows_exact)
        if products is None:
            total: Tensor = residual + self(x)
        else:
            total = products.product(x, self.weight, self.bias, residual)
        return total

    def gated(self, x: Tensor, activation: Activation) -> Tensor | None:
        """The activation of the first half of the product with `x` [T, in] times the second, in one launch: [T, out /
        2]. None where none does it.
        """
        products = None if self.weight is None else products_for(x, self.weight, self.keeps_rows_exact)
        if products is None:
            return None
        channels: Tensor = products.gated_product(x, self.weight, self.bias, activation)
        return channels

    def pack(self, allocate: Allocate = large_page_tensor) -> None:
        """Replace the weight by its packed form (CPU, bf16 only; elsewhere this does nothing)."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not can_pack():
            return
        own = weight.detach().contiguous()
        if packs_with_own_kernel():
            self.hold(DenseWeight.of(own, allocate))
        else:
            self.hold(MkldnnWeight(torch.ops.mkldnn._reorder_linear_weight(own, _PACK_ROWS), weight.nbytes))

    def hold(self, packed: PackedWeight) -> None:
        """Replace the weight by `packed`."""
        self.packed, self.weight = packed, None


@dataclass(frozen=True)
class MkldnnWeight:
    """A bf16 matrix laid out once for oneDNN's kernels.

    oneDNN re-orders a plain bf16 weight on every call; packed ahead, a step over 1-8 rows runs at memory bandwidth
    without any compiled graph.
    """

    packed: Tensor
    nbytes: int

    @property
    def product(self) -> None:
        """See `PackedWeight`."""
        return

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `PackedWeight`; oneDNN takes and gives bfloat16 alone, so that wider rows, such as those of experts, are
        rounded.
        """
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, bias, "none", [], "")
        return out.to(x.dtype)


class Embedding(nn.Module):
    """Rows of a table; the table is a plain parameter, or `packed` once `hold` replaced it."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_rows, size))
        self.packed: PackedTable | None = None

    def forward(self, index: Tensor) -> Tensor:
        """`index` [T] -> [T, size]."""
        if self.packed is None:
            assert self.weight is not None
            return F.embedding(index, self.weight)
        return self.packed.rows(index)

    def hold(self, packed: PackedTable) -> None:
        """Replace the table by `packed`."""
        self.packed, self.weight = packed, None


def can_pack() -> bool:
    """Whether there is a kernel for packed bf16 matrices here: ours, or oneDNN's."""
    if packs_with_own_kernel():
        return True
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def packs_with_own_kernel() -> bool:
    """Whether packed bf16 matrices are ours: copies that share no memory with the plain ones."""
    return not has_amx() and dense_kernel() is not None


def packed_bytes(num_rows: int, width: int) -> int:
    """Memory of a bf16 matrix [N, K] that is packed here."""
    if packs_with_own_kernel():
        return dense_bytes(num_rows, width)
    return num_rows * width * torch.bfloat16.itemsize


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 1910.07467) over the last dimension, computed in float32 or wider.

    `offset` is added to the weights (Gemma keeps them around 0).
    """

    bias: nn.Parameter | None = None

    def __init__(self, shape: int | tuple[int, ...], eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((shape,) if isinstance(shape, int) else shape, 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., size], same shape back; weights [heads, size] are those of its last two dimensions."""
        kernels = kernels_for(x)
        if kernels is not None and self.weight.dtype == x.dtype:
            return kernels.rms_norm(x, self.weight, self.eps, self.offset)
        launches = launches_for(x)
        if launches is not None and self.is_plain_for(x):
            result: Tensor = launches.rms_norm(x, self.weight, self.eps, self.offset)
            return result
        if not self.offset and self.weight.dim() == 1 and self.weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = _widened(x)
        normed = F.rms_norm(wide, (x.shape[-1],), None, self.eps) * (self.offset + self.weight.to(wide.dtype))
        return normed.to(x.dtype)

    def is_plain_for(self, x: Tensor) -> bool:
        """Whether one vector of weights in the format of `x` serves all rows."""
        return self.weight.dim() == 1 and self.weight.dtype == x.dtype


class LayerNorm(nn.Module):
    """Layer norm (Ba et al. 1607.06450) over the last dimension, computed in float32 or wider."""

    def __init__(self, shape: int | tuple[int, ...], eps: float, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape)) if has_bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """See `RMSNorm`."""
        kernels = kernels_for(x)
        if kernels is not None and self.weight.dtype == x.dtype:
            return kernels.layer_norm(x, self.weight, self.bias, self.eps)
        wide = _widened(x)
        normed = F.layer_norm(wide, (x.shape[-1],), None, None, self.eps) * self.weight.to(wide.dtype)
        return (normed if self.bias is None else normed + self.bias.to(wide.dtype)).to(x.dtype)


Norm = RMSNorm | LayerNorm


def norm_of(config: NormConfig, shape: int | tuple[int, ...], eps: float) -> Norm:
    """A norm with weights of `shape`."""
    return LayerNorm(shape, eps, config.has_bias) if config.kind == "layer" else RMSNorm(shape, eps, config.offset)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class MLP(nn.Module):
    """SwiGLU and its relatives (Shazeer 2002.05202), or two matrices with an activation between them.

    Gate and up share one matrix, so that a decode step makes two calls instead of three. `intermediate_size` are this
    rank's channels; its part of the outputs reads all ranks' channels.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: Activation = "silu",
        is_gated: bool = True,
        collective: Collective | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.is_gated = activation, is_gated
        self.collective = collective or SingleRank()
        world = self.collective.world
        self.gate_up_proj = Linear(hidden_size, intermediate_size * (2 if is_gated else 1), bias)
        self.down_proj = Linear(intermediate_size * world, hidden_size // world, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] -> [T, hidden / world]."""
        out: Tensor = self.down_proj(self._channels(x))
        return out

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [T, hidden] plus what is made of `x` [T, hidden], on the only rank."""
        return self.down_proj.added_to(residual, self._channels(x))

    def _channels(self, x: Tensor) -> Tensor:
        """What all ranks give the second matrix, [T, intermediate]."""
        channels = self.gate_up_proj.gated(x, self.activation) if self.is_gated else None
        if channels is None:
            channels = activated(self.gate_up_proj(x), self.activation, self.is_gated)
        return self.collective.all_gather(channels)


def activated(x: Tensor, activation: Activation, is_gated: bool) -> Tensor:
    """The activation of `x` [T, I]; where `is_gated`, that of the first half of `x` [T, 2 I] times the second."""
    kernels = kernels_for(x)
    if kernels is not None:
        return kernels.gate(x, activation) if is_gated else kernels.activate(x, activation)
    if not is_gated:
        return _ACTIVATIONS[activation](x)
    launches = launches_for(x)
    if launches is not None:
        gated: Tensor = launches.gate(x, activation)
        return gated
    gate, up = x.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def softcapped(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`; may overwrite `x`."""
    kernels = kernels_for(x)
    return kernels.softcap(x, cap) if kernels is not None else cap * torch.tanh(x / cap)
