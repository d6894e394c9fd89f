"""The decoder layers of a head: their part of config.json, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.heads.config import default_taps
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_from_hf, config_to_hf
from foretoken.model.fields import shown


def taps_to_outputs(taps: tuple[int, ...]) -> list[int]:
    """Output ids of taps; tap 0, the embedding, becomes -1, which only foretoken reads."""
    return [tap - 1 for tap in taps]


def outputs_to_taps(ids: tuple[int, ...]) -> tuple[int, ...]:
    """Taps of output ids."""
    return tuple(number + 1 for number in ids)


def are_default_taps(taps: tuple[int, ...], num_layers: int) -> bool:
    """Whether every engine reads these layers of its own accord."""
    try:
        return taps == default_taps(num_layers)
    except ConfigError:  # too few layers to have defaults
        return False


Shape = tuple[int, ...]
_NOT_OF_LAYERS = (
    "architectures",
    "is_encoder_decoder",
    "bos_token_id",
    "eos_token_id",
)  # ends of text are the target's


def layer_json(layer: ModelConfig, dtype: str) -> dict[str, Any]:
    """Keys of `config.json`, written by hand: the rope in both spellings and no null.

    `save_pretrained` of transformers 5 writes `rope_parameters` alone, and an engine on transformers 4 then runs with a
    base of 10,000.
    """
    raw = config_to_hf(layer)
    scaling = raw.pop("rope_scaling")
    raw["rope_parameters"] = {"rope_type": layer.rope.kind, "rope_theta": layer.rope.theta, **(scaling or {})}
    if scaling is not None:
        raw["rope_scaling"] = scaling
    raw |= {"tie_word_embeddings": False, "torch_dtype": dtype}
    return {key: value for key, value in raw.items() if value is not None}


def layer_from_json(raw: Mapping[str, Any], where: str, model_type: str) -> ModelConfig:
    """The layers described by a head's configuration, read as those of a `model_type`.

    Raises:
        CheckpointError: see `config_from_hf`.
        UnsupportedModelError: see `config_from_hf`; an activation or a window that heads do not have.
    """
    own = {key: value for key, value in raw.items() if key not in _NOT_OF_LAYERS}
    layer = config_from_hf(own | {"model_type": model_type, "tie_word_embeddings": False}, where)
    if layer.activation != "silu":
        raise UnsupportedModelError(
            f"{where}: hidden_act={shown(raw['hidden_act'])} is not run in a head, only silu; take a head with silu"
        )
    if "sliding_attention" in (raw.get("layer_types") or ()) and not layer.sliding_window:  # llama's readers skip it
        raise UnsupportedModelError(
            f"{where}: layer_types has sliding_attention, which is not run in a head; take a head that attends to the "
            "whole text"
        )
    return layer


def layer_tensors(
    layer: ModelConfig, prefix: str, in_features: int, norms: tuple[str, ...]
) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor of a layer whose attention reads `in_features`; `norms` are of the hidden size."""
    hidden, wide, size = layer.hidden_size, layer.intermediate_size, layer.head_dim
    q, kv = layer.num_heads * size, layer.num_kv_heads * size
    linears = (
        ("self_attn.q_proj", q, in_features, layer.qkv_bias),
        ("self_attn.k_proj", kv, in_features, layer.qkv_bias),
        ("self_attn.v_proj", kv, in_features, layer.qkv_bias),
        ("self_attn.o_proj", hidden, q, layer.o_bias),
        ("mlp.gate_proj", wide, hidden, layer.mlp_bias),
        ("mlp.up_proj", wide, hidden, layer.mlp_bias),
        ("mlp.down_proj", hidden, wide, layer.mlp_bias),
    )
    for name, rows, columns, has_bias in linears:
        yield f"{prefix}.{name}.weight", (rows, columns)
        if has_bias:
            yield f"{prefix}.{name}.bias", (rows,)
    for norm in norms:
        yield f"{prefix}.{norm}.weight", (hidden,)
    if layer.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", (size,)
        yield f"{prefix}.self_attn.k_norm.weight", (size,)
