"""The decoder layers of a head: their part of config.json, and the states of the target that they read."""

from __future__ import annotations

from collections.abc import Mapping
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


# Ends of text are the target's.
_NOT_OF_LAYERS = ("architectures", "is_encoder_decoder", "bos_token_id", "eos_token_id")


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
    # llama's readers skip the types
    if layer.sliding_window or "sliding_attention" in (raw.get("layer_types") or ()):
        raise UnsupportedModelError(
            f"{where}: sliding_attention (sliding_window, layer_types) is not run in a head; take a head that attends "
            "to the whole text"
        )
    return layer
