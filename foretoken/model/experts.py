"""A mixture of experts in place of a layer's MLP: a router, gated MLPs, and in some families a shared one.

Where the CPU's kernels run, one call does all of it (`expert_kernel`); the modules here are its twin in torch's own
operations, which trains, runs on other devices, and says what the call computes. Routing and the sum over experts are
in float32 everywhere: a row's choice among experts must not hang on the rounding of a score.

Shapes: T rows, D hidden size, E experts, S slots of a row (its experts, then the shared one), I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.model.expert_config import ClampedGate, ExpertsConfig
from foretoken.model.expert_kernel import ExpertParts, run_experts
from foretoken.model.layers import Linear, activated
from foretoken.model.row_kernels import kernels_for


class Scores(nn.Module):
    """A small matrix that is kept in float32: a router, or the gate of a shared expert."""

    def __init__(self, num_scores: int, hidden_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_scores, hidden_size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(num_scores, dtype=torch.float32)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, num_scores], in float32 or wider."""
        wide = _wide(x)
        return F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class Expert(nn.Module):
    """A gated MLP; gate and up share one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, clamped: ClampedGate | None) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.clamped = clamped

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, D] in float32 or wider, as which packed matrices multiply; plain ones do in their dtype."""
        weight = self.gate_up_proj.weight
        wide = self.gate_up_proj(x.to(_wide(x) if weight is None else weight.dtype))
        out: Tensor = self.down_proj(_gated(wide, self.clamped))
        return out.to(_wide(x))


class Experts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Scores(config.num_experts, hidden_size, config.router_bias)
        self.experts = nn.ModuleList(
            Expert(hidden_size, config.intermediate_size, config.bias, config.clamped)
            for _ in range(config.num_experts)
        )
        self.shared: Expert | None = None
        self.shared_gate: Scores | None = None
        if config.shared_size:
            self.shared = Expert(hidden_size, config.shared_size, False, config.clamped)
            self.shared_gate = Scores(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [T, D] -> [T, D]."""
        kernels = kernels_for(x)
        if kernels is not None:
            out = run_experts(kernels, self, x)
            if out is not None:
                return out
        return self.mixed(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of each row of `x` [T, D]: experts [T, S], best first and of equal ones the first, and their
        weights [T, S]. The shared expert has the number E and the last slot.
        """
        scores = self.router(x)  # [T, E]
        ranked, order = torch.sort(scores, dim=1, descending=True, stable=True)
        chosen, best = order[:, : self.config.num_active], ranked[:, : self.config.num_active]
        if self.config.normalises:
            weights = torch.softmax(best, dim=1)
        else:
            weights = torch.softmax(scores, dim=1).gather(1, chosen)
        if self.shared_gate is None:
            return chosen, weights
        last = torch.full_like(chosen[:, :1], self.config.num_experts)
        return torch.cat((chosen, last), 1), torch.cat((weights, self.shared_gate(x).sigmoid()), 1)

    def mixed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of what the experts `chosen` [T, S] make of the rows `x` [T, D], times `weights` [T, S]: [T, D].

        Slots are added in ascending order, so that a row's sum does not depend on the other rows.
        """
        parts = torch.empty(*chosen.shape, x.shape[1], dtype=_wide(x), device=x.device)  # [T, S, D]
        for number in sorted(set(chosen.flatten().tolist())):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            parts[rows, slots] = self._expert(number)(x[rows])
        total = torch.zeros_like(parts[:, 0])
        for slot in range(chosen.shape[1]):
            total = total + weights[:, slot, None] * parts[:, slot]
        return total.to(x.dtype)

    def parts(self) -> ExpertParts:
        """What the compiled call takes."""
        experts = [self._expert(number) for number in range(len(self.experts) + (self.shared is not None))]
        return ExpertParts(
            config=self.config,
            gate_up=[expert.gate_up_proj for expert in experts],
            down=[expert.down_proj for expert in experts],
            router=self.router.weight,
            router_bias=self.router.bias,
            shared_gate=None if self.shared_gate is None else self.shared_gate.weight,
        )

    def weight_marks(self) -> tuple[object, ...]:
        """Others than before once weights were replaced, which happens to all of them at once."""
        return self._expert(0).gate_up_proj.packed, self._expert(-1).down_proj.packed, self.router.weight

    def _expert(self, number: int) -> Expert:
        expert = self.shared if number == len(self.experts) else self.experts[number]
        assert isinstance(expert, Expert)
        return expert


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _gated(wide: Tensor, clamped: ClampedGate | None) -> Tensor:
    """`wide` [T, 2 I], gates before ups: [T, I]."""
    if clamped is None:
        return activated(wide, "silu", is_gated=True)
    gate, up = wide.chunk(2, dim=-1)
    gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
    return gate * torch.sigmoid(gate * clamped.alpha) * (up + 1)
