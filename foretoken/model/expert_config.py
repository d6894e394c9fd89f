"""The experts of a mixture: which layers have them, how a router chooses among them, and how they gate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gate: `gate * sigmoid(alpha * gate) * (up + 1)`, with gate <= limit and -limit <= up <= limit."""

    limit: float = 7.0
    alpha: float = 1.702


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts in place of the MLP of some layers (Shazeer et al. 1701.06538).

    A router scores all experts and a row goes to the `num_active` best. Their weights are their softmax over all
    experts, or, with `normalises`, over those that were chosen.
    """

    num_experts: int
    num_active: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # numbers of the layers that have experts, ascending; the others have an ordinary MLP
    normalises: bool = True
    shared_size: int = 0  # intermediate size of the expert that every row goes to, scaled by a sigmoid; 0: none
    router_bias: bool = False
    bias: bool = False  # of the experts' matrices
    clamped: ClampedGate | None = None  # None: silu

    def layer_parameters(self, hidden_size: int) -> int:
        """Number of weights of one layer's experts and router."""
        return self._weights(hidden_size, self.num_experts)

    def step_parameters(self, hidden_size: int, num_rows: int = 1) -> float:
        """Weights of one layer's experts and router that a step of `num_rows` rows reads, see `expected_awake`."""
        return self._weights(hidden_size, self.expected_awake(num_rows))

    def expected_awake(self, num_rows: int) -> float:
        """The expected number of experts that at least one of `num_rows` rows goes to, if the router chose uniformly.

        Trained routers balance their experts over many texts; rows of one text agree more, so fewer are woken.
        """
        return self.num_experts * (1.0 - (1.0 - self.num_active / self.num_experts) ** num_rows)

    def _weights(self, hidden_size: int, num_experts: float) -> int:
        expert = 3 * hidden_size * self.intermediate_size
        expert += (2 * self.intermediate_size + hidden_size) * self.bias
        router = self.num_experts * (hidden_size + self.router_bias)
        shared = (3 * self.shared_size + 1) * hidden_size * (self.shared_size > 0)
        return round(num_experts * expert) + router + shared
