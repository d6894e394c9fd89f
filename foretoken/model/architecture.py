"""What a decoder looks like: one frozen description, read from and written to a Hugging Face `config.json`.

The decoder covers Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3. Other causal families run through `model/hf.py`;
encoder-only and encoder-decoder families are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError

NATIVE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Families that have no causal decoder of their own; named so that the error says what the model is.
_NOT_CAUSAL = {
    "bert": "encoder-only",
    "roberta": "encoder-only",
    "xlm-roberta": "encoder-only",
    "distilbert": "encoder-only",
    "albert": "encoder-only",
    "electra": "encoder-only",
    "deberta": "encoder-only",
    "deberta-v2": "encoder-only",
    "modernbert": "encoder-only",
    "vit": "vision encoder",
    "clip": "vision-text encoder",
    "siglip": "vision-text encoder",
    "whisper": "speech encoder-decoder",
    "camembert": "encoder-only",
    "ernie": "encoder-only",
    "mpnet": "encoder-only",
    "t5": "encoder-decoder",
    "mt5": "encoder-decoder",
    "bart": "encoder-decoder",
    "mbart": "encoder-decoder",
    "marian": "encoder-decoder",
}

# What transformers assumes when config.json leaves a key out, where it differs between families.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}

# The original length that transformers assumes where config.json names none.
_LONGROPE_TRAINED_TOKENS = {"phi3": 4096, "phi4_multimodal": 4096}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling (`kind` as in transformers' `rope_type`)."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3
    factor: float = 1.0
    original_max_tokens: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of one decoder-only checkpoint."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: tuple[int | None, ...] = ()  # one entry per layer; empty = full attention everywhere
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        """Number of positions that `layer` may look back over, itself included; None = all of them."""
        return self.sliding_window[layer] if self.sliding_window else None

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.num_layer_parameters + embeddings + self.hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Number of weights of one layer."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q + kv)
        bias = (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.o_bias
        bias += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.qk_norm
        return attention + 3 * self.hidden_size * self.intermediate_size + bias + norms


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed `config.json`.

    Raises:
        UnsupportedModelError: not a causal decoder, or one that only `model/hf.py` can run.
        CheckpointError: a required key is missing or has the wrong type.
    """
    model_type = check_causal(raw)
    if model_type not in NATIVE_MODEL_TYPES:
        raise UnsupportedModelError(f"model_type={model_type!r} has no native decoder (native: {', '.join(NATIVE_MODEL_TYPES)})")
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantization_config (quant_method={method!r}): take the checkpoint's float16 or bfloat16 version")
    try:
        return _native_config(model_type, _DEFAULTS[model_type] | dict(raw))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModelError | CheckpointError):
            raise
        raise CheckpointError(f"config.json of a {model_type!r} model is incomplete or malformed: {error!r}") from error


def check_causal(raw: Mapping[str, Any]) -> str:
    """Return `model_type`, or refuse by name a family that cannot continue text."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type': this is not a Hugging Face model folder")
    architectures = raw.get("architectures") or []
    # An encoder family may have been trained as a decoder; whether it reads only what came before is then tried out (`trial`).
    decoder = raw.get("is_decoder") is True or any("CausalLM" in str(name) for name in architectures)
    if model_type in _NOT_CAUSAL and not decoder:
        kind = _NOT_CAUSAL[model_type]
        raise UnsupportedModelError(f"model_type={model_type!r} is {kind}: foretoken runs decoder-only causal language models")
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"model_type={model_type!r} is encoder-decoder: foretoken runs decoder-only causal language models")
    return model_type


def rope_context_cap(raw: Mapping[str, Any]) -> int | None:
    """The longest sequence over which the rotation of a position never changes; None where it never does.

    `raw` is a parsed `config.json`, its text part, or what `to_dict` of a transformers configuration gives. With `dynamic` and `longrope`
    scaling the frequencies switch once a sequence is longer than a trained length. Keys that are in the cache by then keep their old
    rotation, so that an answer would depend on which tokens ran together: no two ways of running it agree beyond that length.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return None
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]  # one entry per layer type
    caps = [_switching_length(raw, parameters) for parameters in [scaling, *nested]]
    return min((cap for cap in caps if cap is not None), default=None)


def _switching_length(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> int | None:
    kind = scaling.get("rope_type") or scaling.get("type")
    trained = raw.get("max_position_embeddings")
    # Phi reads both of its old names as longrope.
    if kind in ("longrope", "su") or (kind == "yarn" and raw.get("model_type") in _LONGROPE_TRAINED_TOKENS):
        original = raw.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        lengths = (original or _LONGROPE_TRAINED_TOKENS.get(str(raw.get("model_type"))), trained)
    elif kind == "dynamic":
        lengths = (trained, None)
    else:
        return None
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def _native_config(model_type: str, raw: Mapping[str, Any]) -> ModelConfig:
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={raw['hidden_act']!r} of a {model_type!r} model: the native decoder has silu only")
    hidden, heads, layers = int(raw["hidden_size"]), int(raw["num_attention_heads"]), int(raw["num_hidden_layers"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    # Mistral and Qwen2 ignore the key in transformers; Qwen2 always has biases on q, k, v.
    attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    eos = raw.get("eos_token_id")
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(raw.get("head_dim") or hidden // heads),
        max_context_tokens=int(raw["max_position_embeddings"]),
        rope=_rope_config(raw),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        sliding_window=_sliding_window(model_type, raw, layers),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
    )


def _sliding_window(model_type: str, raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """One window per layer: Mistral everywhere, Qwen by `layer_types` or `max_window_layers`."""
    window = raw.get("sliding_window")
    if model_type == "llama" or not window:
        return ()
    if model_type == "mistral":  # transformers ignores `layer_types` here
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return ()
    types = raw.get("layer_types")
    if types is None:
        first = int(raw["max_window_layers"])
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    elif len(types) < layers:
        raise CheckpointError(f"config.json: layer_types has {len(types)} entries for {layers} layers")
    windows = tuple(int(window) if kind == "sliding_attention" else None for kind in types[:layers])
    return windows if any(windows) else ()


def _rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Read either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise UnsupportedModelError(f"rope_type={kind!r} has no native implementation")
    if float(raw.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 has no native implementation")
    original = scaling.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    trained = int(raw["max_position_embeddings"])
    factor = scaling.get("factor")
    if factor is None and kind == "yarn" and original:
        factor = trained / int(original)
    optional = {key: float(scaling[key]) for key in ("attention_factor", "mscale", "mscale_all_dim") if scaling.get(key) is not None}
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(factor or 1.0),
        original_max_tokens=int(original or trained),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        **optional,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers, llama.cpp and foretoken all read."""
    architectures = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    rope = config.rope
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor, "original_max_position_embeddings": rope.original_max_tokens}
        if rope.kind == "llama3":
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        if rope.kind == "yarn":
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
            optional = {"attention_factor": rope.attention_factor, "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
            scaling |= {key: value for key, value in optional.items() if value is not None}
    raw: dict[str, Any] = {
        "architectures": [architectures[config.model_type]],
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
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": config.qkv_bias and config.model_type != "qwen2",
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else next(iter(config.eos_token_ids), None),
        "torch_dtype": config.dtype,
    }
    if config.model_type == "mistral":
        raw["sliding_window"] = None  # left out, it would mean 4096
    if config.sliding_window:
        raw["sliding_window"] = next(window for window in config.sliding_window if window is not None)
        if config.model_type.startswith("qwen"):
            raw["use_sliding_window"] = True
            raw["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in config.sliding_window]
    return raw
