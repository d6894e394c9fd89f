"""The experts of a mixture: which layers have them, how a router chooses among them, and how they gate."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.model.fields import Fields

MAX_EXPERTS = 4096  # bounds what is made for each of them before the number is compared with the files


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

    def step_parameters(self, hidden_size: int) -> int:
        """Weights of one layer's experts and router that a step of one token reads."""
        return self._weights(hidden_size, self.num_active)

    def _weights(self, hidden_size: int, num_experts: int) -> int:
        expert = 3 * hidden_size * self.intermediate_size
        expert += (2 * self.intermediate_size + hidden_size) * self.bias
        router = self.num_experts * (hidden_size + self.router_bias)
        shared = (3 * self.shared_size + 1) * hidden_size * (self.shared_size > 0)
        return num_experts * expert + router + shared


@dataclass(frozen=True)
class ExpertNames:
    """A layer's tensors of experts behind `model.layers.N.`; an expert's number stands behind `experts`."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class ExpertKeys:
    """How a family's `config.json` describes experts, and what it calls their tensors; `normalises` may be a key."""

    names: ExpertNames = ExpertNames()
    intermediate_size: str = "moe_intermediate_size"
    shared_size: str | None = None
    normalises: bool | str = "norm_topk_prob"
    has_dense_layers: bool = True  # `decoder_sparse_step` and `mlp_only_layers`
    has_biases: bool = False  # of router and experts
    is_clamped: bool = False  # `swiglu_limit` and `swiglu_alpha`
    is_transposed: bool = False  # a tensor of all experts: inputs before outputs, gates and ups in turn


def experts_config(keys: ExpertKeys, fields: Fields, layers: int) -> ExpertsConfig | None:
    """The experts of a decoder with so many layers; None where the configuration leaves every layer its MLP.

    Raises:
        CheckpointError: a value that is missing, of the wrong type, or out of bounds.
    """
    count = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    num_experts = fields.whole(count, least=0, most=MAX_EXPERTS)
    mixtures = tuple(range(layers))
    if keys.has_dense_layers:
        step, dense = fields.whole_or("decoder_sparse_step", 1), _layer_numbers(fields, "mlp_only_layers")
        mixtures = tuple(layer for layer in mixtures if layer not in dense and (layer + 1) % step == 0)
    if not num_experts or not mixtures:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_active=fields.whole("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.whole(keys.intermediate_size),
        layers=mixtures,
        normalises=keys.normalises if isinstance(keys.normalises, bool) else fields.flag(keys.normalises),
        shared_size=fields.whole(keys.shared_size) if keys.shared_size is not None else 0,
        router_bias=keys.has_biases,
        bias=keys.has_biases,
        clamped=_clamped_gate(fields) if keys.is_clamped else None,
    )


def _clamped_gate(fields: Fields) -> ClampedGate:
    known = ClampedGate()
    limit = fields.number_or("swiglu_limit", known.limit)
    return ClampedGate(limit, fields.number_or("swiglu_alpha", known.alpha))


def _layer_numbers(fields: Fields, key: str) -> frozenset[int]:
    value = fields.raw.get(key)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        raise fields.refusal(key, "a list of layers")
    return frozenset(value)
