"""A twin of `kernels.experts_triton` in torch's own operations, whose shapes follow from the number of rows alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.experts_work import StackedExperts, StackedMixture


def run(mixture: StackedMixture, x: Tensor) -> Tensor:
    """See `experts_triton.run`: the matrices of its experts are copied for every row."""
    scores = F.linear(x, mixture.router.to(x.dtype), _as(mixture.router_bias, x))
    ranked, order = torch.sort(scores, dim=1, descending=True, stable=True)
    chosen, best = order[:, : mixture.num_active], ranked[:, : mixture.num_active]
    weights = best.softmax(1) if mixture.normalises else scores.softmax(1).gather(1, chosen)
    out = torch.zeros_like(x)
    for slot in range(mixture.num_active):
        out = out + weights[:, slot, None] * _through(mixture.experts, chosen[:, slot], x)
    if mixture.shared is None:
        return out
    assert mixture.shared_gate is not None
    gate = F.linear(x, mixture.shared_gate.to(x.dtype)).sigmoid()
    return out + gate * _through(mixture.shared, torch.zeros_like(chosen[:, 0]), x)


def _as(table: Tensor | None, x: Tensor) -> Tensor | None:
    return None if table is None else table.to(x.dtype)


def _through(experts: StackedExperts, chosen: Tensor, x: Tensor) -> Tensor:
    """Each row of `x` [T, D] through the expert of `chosen` [T]."""
    wide = torch.einsum("tnk,tk->tn", experts.gate_up[chosen], x)
    if experts.gate_up_bias is not None:
        wide = wide + experts.gate_up_bias[chosen]
    gate, up = wide.chunk(2, dim=1)
    if experts.clamp is None:
        gated = F.silu(gate) * up
    else:
        limit, alpha = experts.clamp
        gate = gate.clamp(max=limit)
        gated = gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1.0)
    out = torch.einsum("tnk,tk->tn", experts.down[chosen], gated)
    return out if experts.down_bias is None else out + experts.down_bias[chosen]
