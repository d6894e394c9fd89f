"""Descriptions of decoders, read from a Hugging Face `config.json` and written to one.

What a family's keys mean is in `families`. Causal families without an entry run through `model/hf.py`; encoder-only and
encoder-decoder families are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.architecture import Activation, ModelConfig, RopeConfig
from foretoken.model.expert_config import experts_config
from foretoken.model.families import FAMILIES, NATIVE_MODEL_TYPES, Family, Flag
from foretoken.model.fields import MAX_LAYERS, Fields, shown
from foretoken.model.rope_json import MAX_CONTEXT_TOKENS, context_tokens, rope_config
from foretoken.model.windows import Windows, rope_layers

_WRITTEN = ("llama", "mistral", "qwen2", "qwen3")  # families that models are trained, widened or written as here
# By the names of transformers.
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Families that have no causal decoder of their own; named so that the error says what the model is.
_NOT_CAUSAL = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert"),
        "encoder-only",
    ),
    **dict.fromkeys(("camembert", "ernie", "mpnet"), "encoder-only"),
    "vit": "vision encoder",
    **dict.fromkeys(("clip", "siglip"), "vision-text encoder"),
    "whisper": "speech encoder-decoder",
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "marian"), "encoder-decoder"),
}


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a parsed `config.json`; `where` names it in errors.

    Raises:
        UnsupportedModelError: not a causal decoder, or one that only `model/hf.py` can run.
        CheckpointError: a required key is missing, or a value has the wrong type or is out of bounds.
    """
    model_type = check_causal(raw, where)
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type={shown(model_type)} has no native decoder (native: {', '.join(NATIVE_MODEL_TYPES)})"
        )
    family = FAMILIES[model_type]
    fields = Fields({**family.defaults, **raw}, where)
    part = next((key for key in ("per_layer_config", "text_config") if fields.has(key)), None)
    if part is not None:
        raise UnsupportedModelError(f"{part} has no native implementation")
    if fields.flag("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention has no native implementation")
    return _native_config(model_type, family, fields)


def check_causal(raw: Mapping[str, Any], where: str = "config.json") -> str:
    """Return `model_type`, or refuse by name a family that cannot continue text.

    Raises:
        UnsupportedModelError: not a causal decoder.
        CheckpointError: a value of the wrong type.
    """
    fields = Fields(raw, where)
    model_type = fields.text("model_type")
    if model_type is None:
        raise CheckpointError(f"{where} has no 'model_type': this is not a Hugging Face model folder")
    architectures = fields.texts("architectures") or ()
    # An encoder family may have been trained as a decoder; whether it reads only what came before is then tried out
    # (`trial`).
    decoder = raw.get("is_decoder") is True or any("CausalLM" in name for name in architectures)
    if model_type in _NOT_CAUSAL and not decoder:
        kind = _NOT_CAUSAL[model_type]
        raise UnsupportedModelError(
            f"model_type={model_type!r} is {kind}: foretoken runs decoder-only causal language models"
        )
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"model_type={shown(model_type)} is encoder-decoder: foretoken runs decoder-only causal language models"
        )
    if fields.has("transformers_weights"):
        raise UnsupportedModelError(
            f"{where}: transformers_weights={shown(raw['transformers_weights'])} names weights of its "
            "own, not read here"
        )
    return model_type


def _native_config(model_type: str, family: Family, fields: Fields) -> ModelConfig:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    for key in family.dropouts:
        fields.check_share(key)
    kv_heads = fields.whole_or("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.where}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = fields.whole_or("head_dim", hidden // heads)
    if head_dim % 2 or not head_dim:
        raise CheckpointError(
            f"{fields.where}: head_dim={head_dim} must be even and positive, because rotary embeddings "
            "turn pairs of channels"
        )
    vocab_size = fields.whole("vocab_size")
    windows = family.windows(fields, layers)
    rope, local_rope = rope_config(model_type, family, fields, head_dim)
    context = context_tokens(fields.raw, fields.whole("max_position_embeddings", most=MAX_CONTEXT_TOKENS))
    activation = _activation(model_type, family, fields)
    experts = None if family.experts is None else experts_config(family.experts, fields, layers)
    if experts is not None and experts.clamped is None and activation != "silu":
        own = shown(fields.text(family.activation))
        raise UnsupportedModelError(f"{family.activation}={own} of experts has no native implementation")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=context,
        rope=rope,
        norm_eps=fields.number_or(family.eps, 1e-6, zero=True),
        qkv_bias=_flag(fields, family.qkv_bias),
        o_bias=_flag(fields, family.o_bias),
        mlp_bias=_flag(fields, family.mlp_bias),
        qk_norm=_flag(fields, family.qk_norm),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=windows,
        bos_token_id=fields.whole("bos_token_id", least=0, most=vocab_size - 1) if fields.has("bos_token_id") else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        dtype=fields.text("dtype") or fields.text("torch_dtype") or "float32",
        norm=family.norm,
        norms=family.norms,
        is_parallel=family.is_parallel,
        qk_norm_over=family.qk_norm_over,
        activation=activation,
        is_gated=family.is_gated,
        local_rope=local_rope,
        rope_layers=_rope_layers(family, fields, layers, windows),
        has_sinks=family.has_sinks,
        experts=experts,
        **_factors(family, fields, hidden),
    )


def _flag(fields: Fields, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else fields.flag(flag)


def _activation(model_type: str, family: Family, fields: Fields) -> Activation:
    if fields.raw.get(family.activation, "silu") is None:  # transformers takes a key that is absent, and no null
        raise fields.refusal(family.activation, f"one of {', '.join(_ACTIVATIONS)}, or absent")
    name = fields.text(family.activation, "silu") or ""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{family.activation}={shown(name)} of a {model_type!r} model: the native decoder has "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _rope_layers(family: Family, fields: Fields, layers: int, windows: Windows) -> tuple[bool, ...]:
    rotate = [True] * layers
    if family.rotates == "no_rope_layers":
        rotate = list(rope_layers(fields, layers))
    elif family.rotates == "windows":
        rotate = [window is not None for window in windows] or [False] * layers
    return () if all(rotate) else tuple(rotate)


def _factors(family: Family, fields: Fields, hidden_size: int) -> dict[str, float]:
    """Multipliers and soft caps, those that the family has."""
    found = {}
    for name in ("embedding_multiplier", "residual_multiplier", "logit_multiplier"):
        key = getattr(family, name)
        if key is not None:
            found[name] = fields.number(key)
    if family.scales_embedding:  # transformers keeps the factor as a float32
        found["embedding_multiplier"] = float(np.float32(hidden_size**0.5))
    if family.attention_multiplier is not None:
        found["attention_scale"] = fields.number(family.attention_multiplier)
    if family.query_scalar is not None:
        found["attention_scale"] = fields.number(family.query_scalar) ** -0.5
    if family.logit_divisor is not None:
        found["logit_multiplier"] = 1.0 / fields.number(family.logit_divisor)
    for name in ("attention_softcap", "logit_softcap"):
        key = getattr(family, name)
        if key is not None and fields.has(key):
            found[name] = fields.number(key)
    return found


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers, llama.cpp and foretoken all read.

    Raises:
        UnsupportedModelError: a family whose checkpoints are only read, or positions scaled by a GGUF file's factors,
        for which `config.json` has no words.
    """
    if config.rope.kind == "factors":
        raise UnsupportedModelError(
            "a GGUF file's scaling of positions (rope_freqs) cannot be written to config.json: give the model's "
            "safetensors checkpoint"
        )
    if config.model_type not in _WRITTEN:
        raise UnsupportedModelError(
            f"a config.json of model_type={shown(config.model_type)} is not written here; written are those of "
            f"{', '.join(_WRITTEN)}"
        )
    ends = config.eos_token_ids
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _scaling_to_hf(config.rope),
        "attention_bias": config.qkv_bias and config.model_type != "qwen2",
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        "torch_dtype": config.dtype,
    }
    return raw | _windows_to_hf(config)


def _scaling_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    """How positions are scaled; None where they are not."""
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_tokens,
    }
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {
            "attention_factor": rope.attention_factor,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
        scaling |= {key: value for key, value in optional.items() if value is not None}
    return scaling


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of sliding windows, those that the family's readers need."""
    if not config.sliding_window:
        return {"sliding_window": None} if config.model_type == "mistral" else {}  # left out, it would mean 4096
    found: dict[str, Any] = {"sliding_window": next(one for one in config.sliding_window if one is not None)}
    if config.model_type.startswith("qwen"):
        found["use_sliding_window"] = True
    if None in config.sliding_window or config.model_type != "mistral":
        found["layer_types"] = [
            "full_attention" if window is None else "sliding_attention" for window in config.sliding_window
        ]
    return found
