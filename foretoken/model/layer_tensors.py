"""The tensors of a decoder layer by the module that holds them: names in a Hugging Face checkpoint, and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from foretoken.model.architecture import ModelConfig
from foretoken.model.expert_config import ExpertNames
from foretoken.model.families import FAMILIES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MatrixTensors:
    """A matrix of the decoder: the tensors that lie one below the other in it, with their rows."""

    rows: Mapping[str, int]
    columns: int
    has_bias: bool

    @property
    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of all tensors, biases included."""
        for name, count in self.rows.items():
            yield f"{name}.weight", (count, self.columns)
            if self.has_bias:
                yield f"{name}.bias", (count,)


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}"


def layer_matrices(config: ModelConfig, layer: int) -> dict[str, MatrixTensors]:
    """The matrices of a layer by the module of `decoder.DecoderLayer` that holds each."""
    names, prefix = FAMILIES[config.model_type].names, layer_prefix(layer)
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    up = [wide] * (2 if config.is_gated else 1)

    def matrix(parts: tuple[str, ...], rows: list[int], columns: int, has_bias: bool) -> MatrixTensors:
        counts = rows if len(parts) == len(rows) else [sum(rows)]  # a checkpoint may have them merged already
        found = {f"{prefix}.{part}": count for part, count in zip(parts, counts, strict=True)}
        return MatrixTensors(found, columns, has_bias)

    found = {
        "qkv_proj": matrix(names.qkv, [q, kv, kv], hidden, config.qkv_bias),
        "o_proj": matrix((names.o,), [hidden], q, config.o_bias),
    }
    if config.has_experts(layer):
        return found | _expert_matrices(config, prefix)
    found["mlp.gate_up_proj"] = matrix(names.gate_up, up, hidden, config.mlp_bias)
    found["mlp.down_proj"] = matrix((names.down,), [hidden], wide, config.mlp_bias)
    return found


def _expert_matrices(config: ModelConfig, prefix: str) -> dict[str, MatrixTensors]:
    """The matrices of a layer's experts, the shared one last."""
    experts, hidden, names = config.experts, config.hidden_size, expert_names(config)
    assert experts is not None
    found = {}

    def add(module: str, name: str, parts: tuple[str, str, str], wide: int, has_bias: bool) -> None:
        gate, up, down = (f"{prefix}.{name}.{part}" for part in parts)
        found[f"{module}.gate_up_proj"] = MatrixTensors({gate: wide, up: wide}, hidden, has_bias)
        found[f"{module}.down_proj"] = MatrixTensors({down: hidden}, wide, has_bias)

    parts = names.gate, names.up, names.down
    for number in range(experts.num_experts):
        add(f"{EXPERTS}{number}", f"{names.experts}.{number}", parts, experts.intermediate_size, experts.bias)
    if experts.shared_size:
        add("mlp.shared", names.shared, ("gate_proj", "up_proj", "down_proj"), experts.shared_size, False)
    return found


EXPERTS = "mlp.experts."  # what the module of an expert begins with


def expert_names(config: ModelConfig) -> ExpertNames:
    """What the family calls the tensors of experts."""
    keys = FAMILIES[config.model_type].experts
    assert keys is not None, "a configuration with experts is of a family with experts"
    return keys.names


def layer_scores(config: ModelConfig, layer: int) -> dict[str, MatrixTensors]:
    """The matrices of a layer that stay in float32, by the module that holds each: the router among experts, and the
    gate of the shared one.
    """
    experts, hidden, prefix = config.experts, config.hidden_size, layer_prefix(layer)
    if experts is None or not config.has_experts(layer):
        return {}
    names = expert_names(config)
    router = MatrixTensors({f"{prefix}.{names.router}": experts.num_experts}, hidden, experts.router_bias)
    if not experts.shared_size:
        return {"mlp.router": router}
    return {"mlp.router": router, "mlp.shared_gate": MatrixTensors({f"{prefix}.{names.shared_gate}": 1}, hidden, False)}


def layer_norms(config: ModelConfig, layer: int) -> dict[str, tuple[str, Shape]]:
    """Name and shape of the weights of each norm of a layer, by the module of `decoder.DecoderLayer` that holds it."""
    names, prefix, size = FAMILIES[config.model_type].names, layer_prefix(layer), (config.hidden_size,)
    norms: dict[str, tuple[str, Shape]] = {
        module: (name, size) for module in NORMS if (name := getattr(names, module)) is not None
    }
    if config.qk_norm:
        norms["q_norm"] = names.q_norm, qk_norm_shape(config, config.num_heads)
        norms["k_norm"] = names.k_norm, qk_norm_shape(config, config.num_kv_heads)
    return {module: (f"{prefix}.{name}", shape) for module, (name, shape) in norms.items()}


NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")  # of the residual stream


def qk_norm_shape(config: ModelConfig, heads: int) -> Shape:
    """The weights of the norm of queries, or keys, of so many heads."""
    shapes = {
        "head": (config.head_dim,),
        "own head": (heads, config.head_dim),
        "projection": (heads * config.head_dim,),
    }
    return shapes[config.qk_norm_over]


def sinks_name(config: ModelConfig, layer: int) -> str:
    """The name of the learnt logits of a layer's heads."""
    return f"{layer_prefix(layer)}.{FAMILIES[config.model_type].names.sinks}"


def layer_tensors(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor of a layer."""
    for matrices in (layer_scores(config, layer), layer_matrices(config, layer)):
        for matrix in matrices.values():
            yield from matrix.shapes
    for module, (name, shape) in layer_norms(config, layer).items():
        yield f"{name}.weight", shape
        if config.norm.has_bias and module in NORMS:
            yield f"{name}.bias", shape
    if config.has_sinks:
        yield sinks_name(config, layer), (config.num_heads,)
