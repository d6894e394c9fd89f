"""The experts of a layer as the Triton kernels (`experts_triton`) read them: one tensor of all experts' matrices."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE_FIELDS = 4  # expert, its first place, how many; the last number is not used: a tile's numbers lie in 16 bytes


@dataclass(frozen=True)
class StackedExperts:
    """Experts of one shape: gates before ups in `gate_up` [E, 2 I, D], `down` [E, D, I], biases [E, 2 I] and [E, D]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: tuple[float, float] | None = None  # limit and alpha of `ClampedGate`; None: silu


@dataclass(frozen=True)
class StackedMixture:
    """A router [E, D] with its bias [E], and the experts among which it chooses `num_active` for each row; every row
    goes to a `shared` one too, times the logistic function of its score by `shared_gate` [1, D].
    """

    experts: StackedExperts
    router: Tensor
    router_bias: Tensor | None
    num_active: int
    normalises: bool  # weights are the softmax over those that were chosen, not over all
    shared: StackedExperts | None = None
    shared_gate: Tensor | None = None


def tile_bound(num_places: int, num_experts: int, lines: int) -> int:
    """Tiles of at most `lines` places that `num_places` places of so many experts may need."""
    return min(num_places, num_experts + num_places // lines)
