"""The weights of one layer's experts, as whoever computes them in one go takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from foretoken.model.expert_config import ExpertsConfig
from foretoken.model.layers import Linear


@dataclass(frozen=True)
class ExpertParts:
    """Weights of one layer's experts, a shared one last; `router` [E, D], `router_bias` [E], `shared_gate` [1, D]."""

    config: ExpertsConfig
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    router: Tensor
    router_bias: Tensor | None
    shared_gate: Tensor | None


class ExpertStack(Protocol):
    """The experts of a layer, as the call takes them."""

    def parts(self) -> ExpertParts:
        """Their weights."""

    def weight_marks(self) -> tuple[object, ...]:
        """Others than before once weights were replaced."""
