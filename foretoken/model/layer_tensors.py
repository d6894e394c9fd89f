"""The tensors of a decoder layer by the module that holds them: names in a Hugging Face checkpoint, and shapes.

Which tensors belong to layers that predict further tokens (MTP), and not to the decoder, follows from one of two
namings. DeepSeek-V3's and GLM's: whole layers behind the last one, as many as `num_nextn_predict_layers` says,
`model.layers.{N + i}.{enorm, hnorm, eh_proj, shared_head.norm, ...}`. Qwen3-Next's: `mtp.{pre_fc_norm_embedding,
pre_fc_norm_hidden, fc, layers.0..., norm}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.model.architecture import ModelConfig
from foretoken.model.expert_config import ExpertNames
from foretoken.model.families import FAMILIES
from foretoken.model.fields import Fields

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


_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_QWEN_PREFIX = "mtp."
_MAX_LAYERS = 64


@dataclass(frozen=True)
class MtpTensors:
    """The tensors of all MTP layers of a checkpoint, and those of the first one by the names that its network has."""

    names: frozenset[str]  # in the checkpoint
    first: Mapping[str, str]  # name in the checkpoint by the network's: fc, enorm, hnorm, norm, layers.0.*, lm_head
    num_layers: int


# Names of the parts of one layer, by the network's own; what is left is its decoder layer.
_DEEPSEEK = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
_QWEN = {
    "fc.weight": "fc.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "shared_head.head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}


def mtp_tensors(names: Iterable[str], raw: Mapping[str, Any], num_layers: int, where: str) -> MtpTensors:
    """The MTP tensors among `names` of a checkpoint whose decoder has `num_layers` layers; `raw` is its `config.json`.

    Raises:
        CheckpointError: `num_nextn_predict_layers` is no number of layers.
    """
    count = Fields(raw, where).whole_or("num_nextn_predict_layers", 0, least=0, most=_MAX_LAYERS)
    found: set[str] = set()
    layers: set[int] = set()
    first: dict[str, str] = {}
    for name in names:
        if name.startswith(_QWEN_PREFIX):
            part = name.removeprefix(_QWEN_PREFIX)
            own, number = _QWEN.get(part, part), _layer_number(part)
        else:
            match = _LAYER.match(name)
            if match is None or not 0 <= (number := int(match[1]) - num_layers) < count:
                continue
            part = name[match.end() :]
            own = _DEEPSEEK.get(part, f"layers.0.{part}")
        found.add(name)
        layers.add(number)
        if number == 0:
            first[own] = name
    return MtpTensors(frozenset(found), first, len(layers))


def _layer_number(part: str) -> int:
    """The layer of a Qwen tensor behind its prefix; what all layers share counts as the first one's."""
    match = re.match(r"layers\.(\d+)\.", part)
    return 0 if match is None else int(match[1])
