"""EAGLE heads: version 3 is the portable directory that vLLM, SGLang, TensorRT-LLM and llama.cpp read alike, version 1
serves EAGLE-1 and EAGLE-2 (SafeAILab/EAGLE; vllm/model_executor/models/llama_eagle3.py; sglang's llama_eagle3.py).
"""

from __future__ import annotations

from typing import Any

from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.heads.config import EagleConfig, default_taps
from foretoken.heads.formats.layers import (
    are_default_taps,
    layer_from_json,
    layer_json,
    outputs_to_taps,
    taps_to_outputs,
)
from foretoken.heads.formats.pairing import beside_target, check_sizes
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields

ARCHITECTURE_3 = "LlamaForCausalLMEagle3"
ARCHITECTURE_1, ARCHITECTURE_1_BIAS = "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYERS = ("llama", "qwen2", "qwen3")  # families whose layers EAGLE heads have
_MAX_TAPS = 1024  # bounds a list that is read before it is compared with the target


def eagle_json(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """`config.json` of a head.

    Raises:
        ConfigError: layers that the format has no words for.
    """
    layer = config.layer
    if layer.model_type not in _LAYERS or layer.qk_norm != (layer.model_type == "qwen3"):
        written = f"the layers of an EAGLE head are written as one of {', '.join(_LAYERS)}"
        raise ConfigError("model_type", layer.model_type, written)
    raw = layer_json(layer, dtype) | {"target_hidden_size": config.target_hidden_size, "bias": config.fc_bias}
    if config.version == 1:
        # vLLM reads the first and has no bias; SGLang the second, which leaves a missing bias random.
        return raw | {"architectures": [ARCHITECTURE_1_BIAS if config.fc_bias else ARCHITECTURE_1]}
    raw |= {"architectures": [ARCHITECTURE_3], "draft_vocab_size": config.draft_vocab_size}
    raw |= {flag: getattr(config, flag) for flag in NORM_FLAGS}
    own: dict[str, Any] = {}
    if config.norm_before_fc:
        own["norm_before_fc"] = True  # llama.cpp reads the top level only, TensorRT-LLM this only
    if not are_default_taps(config.taps, config.target_num_layers):
        raw[_AUX_IDS] = list(config.taps)  # vLLM and llama.cpp
        if 0 not in config.taps:  # the embedding is no layer's output
            own |= {"use_aux_hidden_state": True, _AUX_IDS: taps_to_outputs(config.taps)}  # SGLang
    return raw | {"eagle_config": own} if own else raw


def eagle_from_json(fields: Fields, target: ModelConfig, names: frozenset[str]) -> EagleConfig:
    """The head that a `config.json` and the `names` of its tensors describe."""
    if "mask_hidden" in names:
        raise UnsupportedModelError(
            "the head holds mask_hidden: P-EAGLE, a parallel variant that is not run here; take an EAGLE-3 head, or "
            "train a block drafter (foretoken train block)"
        )
    is_version_3 = any("Eagle3" in name for name in fields.texts("architectures") or ())
    is_version_3 |= fields.has("draft_vocab_size")
    raw = dict(fields.raw)
    if is_version_3 and not fields.has("num_hidden_layers"):
        raw["num_hidden_layers"] = 1
    layer = layer_from_json(raw, fields.where, _model_type(fields, names))
    wide = fields.whole_or("target_hidden_size", layer.hidden_size)
    layer = beside_target(layer, target)
    taps: tuple[int, ...] = (target.num_layers,)
    size, options = layer.vocab_size, dict[str, bool]()
    if is_version_3:
        taps, own = _taps(fields, target), fields.fields("eagle_config") or Fields({}, fields.where)
        size = fields.whole_or("draft_vocab_size", layer.vocab_size, most=layer.vocab_size)
        options = {flag: fields.flag(flag) for flag in NORM_FLAGS}
        options["norm_before_fc"] = fields.flag("norm_before_fc", own.flag("norm_before_fc"))
        has_matrix = "lm_head.weight" in names or layer.hidden_size != wide
        options["has_own_output"] = size == layer.vocab_size and has_matrix
    check_sizes(fields.where, target, wide, layer.vocab_size, taps)
    return EagleConfig(
        version=3 if is_version_3 else 1,
        layer=layer,
        target_hidden_size=wide,
        target_num_layers=target.num_layers,
        taps=taps,
        draft_vocab_size=size,
        fc_bias="fc.bias" in names,
        **options,
    )


def _model_type(fields: Fields, names: frozenset[str]) -> str:
    """The family of a head's layers, by their tensors: Qwen3's norms (`--draft-arch qwen3` of speculators), or Qwen2's
    biases (`qkv_bias` of SafeAILab's heads), which `model_type` often does not tell.
    """
    parts = {name.partition("self_attn.")[2] for name in names}
    if "q_norm.weight" in parts:
        return "qwen3"
    return "qwen2" if "q_proj.bias" in parts and not fields.flag("attention_bias") else "llama"


def network_name(config: EagleConfig, name: str) -> str:
    """How `EagleHead` calls a tensor of a file: several spellings of the layer are in use."""
    if config.version == 3 and config.layer.num_layers == 1:
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Layers that an EAGLE-3 head reads: the top level (enter) before `eagle_config` (output), as in vLLM, and
    `target_layer_ids` (output) of DeepSpec's heads.
    """
    ids = layer_ids(fields, _AUX_IDS)
    if ids is not None:
        return ids
    own = fields.fields("eagle_config")
    outputs = None if own is None else layer_ids(own, _AUX_IDS)
    outputs = outputs or layer_ids(fields, "target_layer_ids", least=-1)
    return default_taps(target.num_layers) if outputs is None else outputs_to_taps(outputs)


def layer_ids(fields: Fields, key: str, least: int = 0) -> tuple[int, ...] | None:
    """A list of layers, ascending, each once (engines sort them), from `least` on; None where there is none.

    Raises:
        CheckpointError: something else.
    """
    value = fields.raw.get(key)
    if value is None:
        return None
    good = isinstance(value, list) and 0 < len(value) <= _MAX_TAPS
    good = good and all(isinstance(item, int) and not isinstance(item, bool) and item >= least for item in value)
    if not good or value != sorted(set(value)):
        raise fields.refusal(key, "a list of layer numbers, ascending, each once")
    return tuple(value)
