"""The parts of a decoder layer that know nothing about sequences: linear, norm, gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Row count that oneDNN lays packed weights out for. Decode and verify passes hold 1-16 rows; measured flat over 1-8
# (benchmarks/), and prefill loses nothing against the plain layout.
_PACK_ROWS = 8


class Linear(nn.Module):
    """`x @ weight.T + bias`, with weights packed once for the CPU's matrix kernels when `pack` is called.

    oneDNN re-orders a plain bf16 weight on every call; packed ahead, a step over 1-8 rows runs at memory bandwidth
    without any compiled graph.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, in] -> [T, out]."""
        if self._packed is None:
            assert self.weight is not None
            return F.linear(x, self.weight, self.bias)
        packed_linear: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return packed_linear

    def pack(self) -> None:
        """Replace the weight by its packed form (CPU, bf16 only; elsewhere this does nothing)."""
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not can_pack():
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACK_ROWS)
        self.weight = None


def can_pack() -> bool:
    """Whether this torch build and processor have the packed bf16 linear."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 1910.07467) over the last dimension, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., size], same shape back."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2002.05202); gate and up share one matrix, so a decode step makes two calls instead of three."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
