"""What a decoder looks like: one frozen description, read from and written to a Hugging Face `config.json`.

The decoder covers Llama 2/3.x, Mistral, Qwen2/2.5 and Qwen3. Other causal families run through `model/hf.py`;
encoder-only and encoder-decoder families are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import Fields, shown

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
    "qwen2": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}

_MOST_CONTEXT_TOKENS = (
    2**24
)  # the last position that the float32 arithmetic of rotary embeddings, here and in transformers, can count to
_MOST_LAYERS = 100_000  # bounds what is made for each of them before the number is compared with the files
# The original length that transformers assumes where config.json names none.
_LONGROPE_TRAINED_TOKENS = {"phi3": 4096, "phi4_multimodal": 4096}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling (`kind` as in transformers' `rope_type`)."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3 | factors (GGUF)
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
    factors: tuple[float, ...] = ()  # factors: what the frequency of each pair of channels is divided by


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
    attention_scale: float | None = None  # of dot products of queries and keys; None: head_dim ** -0.5
    attention_softcap: float = 0.0  # a score s becomes cap * tanh(s / cap); 0: it stays
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def window(self, layer: int) -> int | None:
        """Number of positions that `layer` may look back over, itself included; None = all of them."""
        return self.sliding_window[layer] if self.sliding_window else None

    @property
    def score_scale(self) -> float:
        """What dot products of queries and keys are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

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


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a parsed `config.json`; `where` names it in errors.

    Raises:
        UnsupportedModelError: not a causal decoder, or one that only `model/hf.py` can run.
        CheckpointError: a required key is missing, or a value has the wrong type or is out of bounds.
    """
    model_type = check_causal(raw, where)
    if model_type not in NATIVE_MODEL_TYPES:
        raise UnsupportedModelError(
            f"model_type={shown(model_type)} has no native decoder (native: {', '.join(NATIVE_MODEL_TYPES)})"
        )
    fields = Fields(_DEFAULTS[model_type] | dict(raw), where)
    part = next((key for key in ("per_layer_config", "text_config") if fields.has(key)), None)
    if part is not None:
        raise UnsupportedModelError(f"{part} has no native implementation")
    return _native_config(model_type, fields)


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


def rope_context_cap(raw: Mapping[str, Any]) -> int | None:
    """The longest sequence over which the rotation of a position never changes; None where it never does.

    `raw` is a parsed `config.json`, its text part, or what `to_dict` of a transformers configuration gives. With
    `dynamic` and `longrope` scaling the frequencies switch once a sequence is longer than a trained length. Keys that
    are in the cache by then keep their old rotation, so that an answer would depend on which tokens ran together: no
    two ways of running it agree beyond that length.

    Raises:
        CheckpointError: a base of the frequencies that is not positive, which makes them infinite.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return None
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]  # one entry per layer type
    for parameters in [scaling, *nested]:
        theta = parameters.get("rope_theta")
        if isinstance(theta, int | float) and not theta > 0:
            raise CheckpointError(f"config.json: rope_theta={shown(theta)} must be a positive number")
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


def _native_config(model_type: str, fields: Fields) -> ModelConfig:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act={shown(activation)} of a {model_type!r} model: the native decoder has silu only"
        )
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers", most=_MOST_LAYERS)
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
    # Mistral and Qwen2 ignore the key in transformers; Qwen2 always has biases on q, k, v.
    attention_bias = fields.flag("attention_bias") and model_type in ("llama", "qwen3")
    vocab_size = fields.whole("vocab_size")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=fields.whole("max_position_embeddings", most=_MOST_CONTEXT_TOKENS),
        rope=_rope_config(fields),
        norm_eps=fields.number_or("rms_norm_eps", 1e-6, zero=True),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias") and model_type == "llama",
        qk_norm=model_type == "qwen3",
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=_sliding_window(model_type, fields, layers),
        bos_token_id=fields.whole("bos_token_id", least=0, most=vocab_size - 1) if fields.has("bos_token_id") else None,
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        dtype=fields.text("dtype") or fields.text("torch_dtype") or "float32",
    )


def _sliding_window(model_type: str, fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One window per layer: `layer_types` where the family reads it, else Mistral everywhere and Qwen from
    `max_window_layers` on.
    """
    types = _layer_types(fields, layers)
    if model_type == "llama":  # the family reads none of it
        return ()
    # transformers runs a Mistral with `layer_types` as Ministral, which reads the list; Qwen has a switch on top.
    windowed = model_type == "mistral" or fields.flag("use_sliding_window")
    given = fields.whole("sliding_window") if fields.has("sliding_window") else None
    window = given if windowed else None
    first = 0 if model_type == "mistral" else fields.whole("max_window_layers", least=0)
    if types is None:
        return () if window is None else _windows([window if layer >= first else None for layer in range(layers)])
    if window is None and "sliding_attention" in types:
        switch = "" if model_type == "mistral" else " or use_sliding_window is false"
        raise CheckpointError(f"{fields.where}: layer_types has sliding_attention, but sliding_window is null{switch}")
    return _windows([window if kind == "sliding_attention" else None for kind in types])


def _windows(windows: list[int | None]) -> tuple[int | None, ...]:
    return tuple(windows) if any(windows) else ()


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...] | None:
    types = fields.texts("layer_types")
    if types is None:
        return None
    if len(types) != layers:
        raise CheckpointError(f"{fields.where}: layer_types has {len(types)} entries for num_hidden_layers={layers:,}")
    other = next((kind for kind in types if kind not in ("full_attention", "sliding_attention")), None)
    if other is not None:
        raise UnsupportedModelError(f"layer_types with {shown(other)} has no native implementation")
    return types


def _rope_config(fields: Fields) -> RopeConfig:
    """Read either spelling, with the precedence of transformers 5: `rope_scaling` (4) before `rope_parameters` (5),
    then `rope_theta`.
    """
    named = (
        found for key in ("rope_scaling", "rope_parameters") if (found := fields.fields(key)) is not None and found.raw
    )
    scaling = next(named, Fields({}, fields.where))
    if any(isinstance(value, Mapping) or key.endswith("_attention") for key, value in scaling.raw.items()):
        raise UnsupportedModelError("rope parameters by layer type have no native implementation")
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    if kind not in ("default", "linear", "dynamic", "yarn", "llama3"):
        raise UnsupportedModelError(f"rope_type={shown(kind)} has no native implementation")
    if any(source.number_or("partial_rotary_factor", 1.0) != 1.0 for source in (fields, scaling)):
        raise UnsupportedModelError("partial_rotary_factor other than 1 has no native implementation")
    # A base of 1 turns all channels alike, and YaRN divides by its logarithm.
    theta = (
        scaling.number("rope_theta", above=1.0)
        if scaling.has("rope_theta")
        else fields.number_or("rope_theta", 10_000.0, above=1.0)
    )
    trained = fields.whole("max_position_embeddings", most=_MOST_CONTEXT_TOKENS)
    outer = next((source for source in (fields, scaling) if source.has("original_max_position_embeddings")), None)
    original = trained if outer is None else outer.whole("original_max_position_embeddings", most=_MOST_CONTEXT_TOKENS)
    rope = RopeConfig(theta=theta, kind=kind, original_max_tokens=original)
    if kind == "default":
        return rope
    if kind == "yarn" and "factor" in scaling.raw and not scaling.has("factor"):
        rope = replace(rope, factor=trained / original)
    else:
        rope = replace(rope, factor=scaling.number("factor"))
    if kind == "llama3":
        return replace(
            rope, low_freq_factor=scaling.number("low_freq_factor"), high_freq_factor=scaling.number("high_freq_factor")
        )
    if kind == "yarn":
        return _yarn_config(rope, scaling)
    return rope


def _yarn_config(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    def optional(key: str) -> float | None:
        return scaling.number(key, zero=True) if scaling.has(key) else None

    return replace(
        rope,
        beta_fast=optional("beta_fast") or 32.0,  # transformers takes 0 as unset too
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=scaling.flag("truncate", default="truncate" not in scaling.raw),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers, llama.cpp and foretoken all read.

    Raises:
        UnsupportedModelError: positions scaled by a GGUF file's factors, for which `config.json` has no words.
    """
    if config.rope.kind == "factors":
        raise UnsupportedModelError(
            "a GGUF file's scaling of positions (rope_freqs) cannot be written to config.json: give the model's "
            "safetensors checkpoint"
        )
    architectures = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    rope = config.rope
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {
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
        "eos_token_id": list(config.eos_token_ids)
        if len(config.eos_token_ids) > 1
        else next(iter(config.eos_token_ids), None),
        "torch_dtype": config.dtype,
    }
    if config.model_type == "mistral":
        raw["sliding_window"] = None  # left out, it would mean 4096
    if config.sliding_window:
        raw["sliding_window"] = next(window for window in config.sliding_window if window is not None)
        if config.model_type.startswith("qwen"):
            raw["use_sliding_window"] = True
        if None in config.sliding_window or config.model_type != "mistral":
            raw["layer_types"] = [
                "full_attention" if window is None else "sliding_attention" for window in config.sliding_window
            ]
    return raw
