"""The families that the native decoder runs: one entry for each, and nothing else knows their names.

An entry says how a Hugging Face `config.json` describes the family's decoder (`config_json` reads it), what
transformers assumes where the file leaves a key out, and what the tensors are called (`layer_tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from foretoken.model.architecture import NormConfig, QkNorm
from foretoken.model.expert_config import ExpertKeys, ExpertNames
from foretoken.model.windows import (
    WindowReader,
    alternating,
    behind_a_switch,
    by_layer_types,
    every_second_behind_a_switch,
    everywhere,
    everywhere_behind_a_switch,
    no_windows,
    of_layers_that_do_not_rotate,
    patterned,
)

_RMS = NormConfig()
Flag = bool | str  # a constant of the family, or the key of `config.json` that says so


@dataclass(frozen=True)
class LayerNames:
    """The tensors of a layer behind `model.layers.N.`; those of one tuple become one matrix. None: there is none."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    attention_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None


@dataclass(frozen=True)
class Family:
    """One family; `defaults` are transformers' own for keys that `config.json` leaves out."""

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: LayerNames = LayerNames()
    norm: NormConfig = _RMS
    norms: Literal["before", "after", "around"] = "before"
    is_parallel: bool = False
    eps: str = "rms_norm_eps"
    qkv_bias: Flag = False
    o_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: Flag = False
    qk_norm_over: QkNorm = "head"
    activation: str = "hidden_act"
    dropouts: tuple[str, ...] = ()  # keys without effect here, of which transformers refuses values that are no shares
    is_gated: bool = True
    windows: WindowReader = no_windows
    has_sinks: bool = False
    experts: ExpertKeys | None = None
    # Rotation: whether a part of a head's channels may be rotated, how pairs lie, whether windows have their own.
    is_partial: bool = False
    is_interleaved: bool = False
    has_longrope: bool = False
    has_local_rope: bool = False
    rotates: Literal["all", "no_rope_layers", "windows"] = "all"  # which layers
    # Keys of factors; of the last two, one multiplies and one divides.
    embedding_multiplier: str | None = None
    scales_embedding: bool = False  # by the square root of the width
    residual_multiplier: str | None = None
    attention_multiplier: str | None = None
    query_scalar: str | None = None  # attention scores are divided by its square root
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    attention_softcap: str | None = None
    logit_softcap: str | None = None


_QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN_MOE_DEFAULTS = {"max_position_embeddings": 32_768, "sliding_window": 4096}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA = Family(
    "Gemma2ForCausalLM",
    {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    names=LayerNames(
        attention_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    ),
    norm=NormConfig(offset=1.0),
    norms="around",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    activation="hidden_activation",
    windows=alternating,
    scales_embedding=True,
    query_scalar="query_pre_attn_scalar",
    attention_softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)
_GLM = Family(
    "GlmForCausalLM",
    {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    names=LayerNames(gate_up=("mlp.gate_up_proj",)),
    qkv_bias="attention_bias",
    is_partial=True,
    is_interleaved=True,
)
_COHERE = Family(
    "CohereForCausalLM",
    {
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "rope_theta": 500_000.0,
    },
    names=LayerNames(mlp_norm=None),
    norm=NormConfig(kind="layer"),
    is_parallel=True,
    eps="layer_norm_eps",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="use_qk_norm",
    qk_norm_over="own head",
    is_interleaved=True,
    logit_multiplier="logit_scale",
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            "LlamaForCausalLM",
            {"max_position_embeddings": 2048},
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        # Mistral ignores attention_bias in transformers, as Qwen2 does, which always has biases on q, k and v.
        "mistral": Family(
            "MistralForCausalLM",
            {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
            windows=by_layer_types,
        ),
        "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, qkv_bias=True, windows=behind_a_switch),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            _QWEN_DEFAULTS | {"head_dim": 128},
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=behind_a_switch,
        ),
        "gemma2": _GEMMA,
        "gemma3_text": replace(
            _GEMMA,
            architecture="Gemma3ForCausalLM",
            defaults={
                **_GEMMA.defaults,
                "max_position_embeddings": 131_072,
                "sliding_window_pattern": 6,
                "final_logit_softcapping": None,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            qk_norm=True,
            windows=patterned,
            has_local_rope=True,
            attention_softcap=None,  # transformers reads the key and does nothing with it
        ),
        "phi3": Family(
            "Phi3ForCausalLM",
            {
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
            },
            names=LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
            dropouts=("resid_pdrop", "embd_pdrop"),
            windows=everywhere,
            is_partial=True,
            has_longrope=True,
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
            names=LayerNames(
                attention_norm=None,
                attention_out_norm="post_attention_layernorm",
                mlp_norm=None,
                mlp_out_norm="post_feedforward_layernorm",
            ),
            norms="after",
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            qk_norm_over="projection",
        ),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            {
                "max_position_embeddings": 32_768,
                "num_key_value_heads": 4,
                "rope_theta": 2_000_000.0,
                "no_rope_layer_interval": 4,
                "tie_word_embeddings": True,
            },
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            windows=of_layers_that_do_not_rotate,
            rotates="no_rope_layers",
        ),
        "granite": Family(
            "GraniteForCausalLM",
            {
                "max_position_embeddings": 2048,
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            mlp_bias="mlp_bias",
            embedding_multiplier="embedding_multiplier",
            residual_multiplier="residual_multiplier",
            attention_multiplier="attention_multiplier",
            logit_divisor="logits_scaling",
        ),
        "glm": _GLM,
        "glm4": replace(
            _GLM,
            architecture="Glm4ForCausalLM",
            names=LayerNames(
                gate_up=("mlp.gate_up_proj",),
                attention_out_norm="post_self_attn_layernorm",
                mlp_out_norm="post_mlp_layernorm",
            ),
            norms="around",
        ),
        "starcoder2": Family(
            "Starcoder2ForCausalLM",
            {
                "max_position_embeddings": 4096,
                "num_key_value_heads": 2,
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": 1e-5,
                "use_bias": True,
                "tie_word_embeddings": True,
            },
            names=LayerNames(gate_up=("mlp.c_fc",), down="mlp.c_proj"),
            norm=NormConfig(kind="layer", has_bias=True),
            eps="norm_epsilon",
            qkv_bias="use_bias",
            o_bias="use_bias",
            mlp_bias="use_bias",
            dropouts=("residual_dropout", "embedding_dropout"),
            is_gated=False,
            windows=everywhere,
        ),
        "cohere": _COHERE,
        "cohere2": replace(
            _COHERE,
            architecture="Cohere2ForCausalLM",
            defaults={
                **_COHERE.defaults,
                "rope_theta": 10_000.0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            qk_norm=False,
            windows=patterned,
            rotates="windows",
        ),
        "mixtral": Family(
            "MixtralForCausalLM",
            {
                "max_position_embeddings": 131_072,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            windows=everywhere,
            experts=ExpertKeys(
                ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
                intermediate_size="intermediate_size",
                normalises=True,
                has_dense_layers=False,
            ),
        ),
        "qwen2_moe": Family(
            "Qwen2MoeForCausalLM",
            _QWEN_MOE_DEFAULTS
            | {
                "num_key_value_heads": 16,
                "max_window_layers": 28,
                "qkv_bias": True,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts_per_tok": 4,
                "num_experts": 60,
            },
            qkv_bias="qkv_bias",
            windows=every_second_behind_a_switch,
            experts=ExpertKeys(shared_size="shared_expert_intermediate_size"),
        ),
        "qwen3_moe": Family(
            "Qwen3MoeForCausalLM",
            _QWEN_MOE_DEFAULTS
            | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128},
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm=True,
            windows=everywhere_behind_a_switch,
            experts=ExpertKeys(),
        ),
        "gpt_oss": Family(
            "GptOssForCausalLM",
            {
                "max_position_embeddings": 131_072,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0,
                "rope_parameters": _GPT_OSS_ROPE,
                "sliding_window": 128,
                "attention_bias": True,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
            },
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            windows=alternating,
            has_sinks=True,
            experts=ExpertKeys(
                ExpertNames(router="mlp.router"),
                intermediate_size="intermediate_size",
                normalises=True,
                has_dense_layers=False,
                has_biases=True,
                is_clamped=True,
                is_transposed=True,
            ),
        ),
    }
)

NATIVE_MODEL_TYPES = tuple(FAMILIES)
