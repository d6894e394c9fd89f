"""Thirty widely downloaded models: the keys of their published `config.json` that decide how they run.

Sizes that decide nothing are left as published too; keys that say nothing about the computation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.errors import UnsupportedModelError
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import check_causal, config_from_hf
from foretoken.model.families import FAMILIES
from foretoken.model.fields import Fields
from foretoken.model.packed.weights import method_of, packed_format
from tests.helpers.family_trial import CACHED, NATIVE, REFUSED


@dataclass(frozen=True)
class PublishedModel:
    """`name` on the hub; `raw` is its configuration."""

    name: str
    raw: dict[str, Any]

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Name, family, how it runs, and what is to be known about it: a row of docs/models.md.

        As `open.native_config` decides, but for the weights, which are not at hand.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        family = str(self.raw["model_type"])
        try:
            check_causal(self.raw)
        except UnsupportedModelError as error:
            return self.name, family, REFUSED, str(error).removeprefix(f"model_type={family!r} is ").partition(":")[0]
        try:
            config = config_from_hf(self.raw)
            fields = Fields(self.raw, self.name)
            own = FAMILIES[family].experts is not None and method_of(fields) in (None, "mxfp4")
            packed = None if own else packed_format(fields)
            assert packed is None
        except UnsupportedModelError as error:
            how = CACHED if family in CONFIG_MAPPING_NAMES else REFUSED
            return self.name, family, how, "" if "has no native decoder" in str(error) else str(error)
        return self.name, family, NATIVE, _note(config)


def _note(config: ModelConfig) -> str:
    notes = [f"{config.max_context_tokens:,} tokens"]
    if config.rope.kind == "longrope":
        notes[0] += ", the length before LongRoPE's factors change"
    windows = [window for window in config.sliding_window if window is not None and window < config.max_context_tokens]
    if windows:
        notes.append(f"windows of {windows[0]:,} in {len(windows)} of {config.num_layers} layers")
    if config.experts is not None:
        notes.append(f"{config.experts.num_experts} experts, {config.experts.num_active} of them for a token")
    return "; ".join(notes)


def table() -> str:
    """The rows of docs/models.md."""
    return "\n".join(f"| {' | '.join(model.row)} |" for model in MODELS)


def _shape(
    model_type: str, architecture: str, sizes: tuple[int, int, int, int, int], context: int, vocab: int, **options: Any
) -> dict[str, Any]:
    """`sizes`: width, MLP, layers, heads, key/value heads."""
    hidden, wide, layers, heads, kv_heads = sizes
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        **options,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _longrope(pairs: int) -> dict[str, Any]:
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": [1.0] * pairs}


_LLAMA, _QWEN2, _QWEN3 = ("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")
_PHI3 = ("phi3", "Phi3ForCausalLM")
_QWEN2_WINDOW = {"use_sliding_window": False, "sliding_window": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3_OPTIONS = {"head_dim": 128, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
_QWEN3_OPTIONS |= {"rms_norm_eps": 1e-6}

MODELS = tuple(
    PublishedModel(name, raw)
    for name, raw in {
        "meta-llama/Llama-3.1-8B-Instruct": _shape(
            *_LLAMA, (4096, 14_336, 32, 32, 8), 131_072, 128_256, rope_theta=5e5, rope_scaling=_llama3(8.0)
        ),
        "meta-llama/Llama-3.2-1B-Instruct": _shape(
            *_LLAMA,
            (2048, 8192, 16, 32, 8),
            131_072,
            128_256,
            head_dim=64,
            rope_theta=5e5,
            rope_scaling=_llama3(32.0),
            tie_word_embeddings=True,
        ),
        "meta-llama/Llama-3.3-70B-Instruct": _shape(
            *_LLAMA, (8192, 28_672, 80, 64, 8), 131_072, 128_256, rope_theta=5e5, rope_scaling=_llama3(8.0)
        ),
        "HuggingFaceTB/SmolLM2-135M-Instruct": _shape(
            *_LLAMA, (576, 1536, 30, 9, 3), 8192, 49_152, rope_theta=1e5, tie_word_embeddings=True
        ),
        "HuggingFaceTB/SmolLM3-3B": _shape(
            "smollm3",
            "SmolLM3ForCausalLM",
            (2048, 11_008, 36, 16, 4),
            65_536,
            128_256,
            rope_theta=5e6,
            no_rope_layers=[1, 1, 1, 0] * 9,
            use_sliding_window=False,
            sliding_window=None,
            tie_word_embeddings=True,
        ),
        "mistralai/Mistral-7B-Instruct-v0.3": _shape(
            "mistral",
            "MistralForCausalLM",
            (4096, 14_336, 32, 32, 8),
            32_768,
            32_768,
            rope_theta=1e6,
            sliding_window=None,
        ),
        "mistralai/Mixtral-8x7B-Instruct-v0.1": _shape(
            "mixtral",
            "MixtralForCausalLM",
            (4096, 14_336, 32, 32, 8),
            32_768,
            32_000,
            rope_theta=1e6,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "Qwen/Qwen2.5-0.5B-Instruct": _shape(
            *_QWEN2,
            (896, 4864, 24, 14, 2),
            32_768,
            151_936,
            max_window_layers=21,
            tie_word_embeddings=True,
            **_QWEN2_WINDOW,
        ),
        "Qwen/Qwen2.5-1.5B-Instruct": _shape(
            *_QWEN2,
            (1536, 8960, 28, 12, 2),
            32_768,
            151_936,
            max_window_layers=21,
            tie_word_embeddings=True,
            **_QWEN2_WINDOW,
        ),
        "Qwen/Qwen2.5-7B-Instruct": _shape(
            *_QWEN2, (3584, 18_944, 28, 28, 4), 32_768, 152_064, max_window_layers=28, **_QWEN2_WINDOW
        ),
        "Qwen/Qwen3-0.6B": _shape(
            *_QWEN3,
            (1024, 3072, 28, 16, 8),
            40_960,
            151_936,
            rope_theta=1e6,
            tie_word_embeddings=True,
            **_QWEN3_OPTIONS,
        ),
        "Qwen/Qwen3-8B": _shape(*_QWEN3, (4096, 12_288, 36, 32, 8), 40_960, 151_936, rope_theta=1e6, **_QWEN3_OPTIONS),
        "Qwen/Qwen3-30B-A3B-Instruct-2507": _shape(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (2048, 6144, 48, 32, 4),
            262_144,
            151_936,
            rope_theta=1e7,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            **_QWEN3_OPTIONS,
        ),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": _shape(
            "qwen3_next", "Qwen3NextForCausalLM", (2048, 5120, 48, 16, 2), 262_144, 151_936, num_experts=512
        ),
        "google/gemma-2-2b-it": _shape(
            "gemma2",
            "Gemma2ForCausalLM",
            (2304, 9216, 26, 8, 4),
            8192,
            256_000,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        ),
        "google/gemma-3-1b-it": _shape(
            "gemma3_text",
            "Gemma3ForCausalLM",
            (1152, 6912, 26, 4, 1),
            32_768,
            262_144,
            head_dim=256,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            rope_scaling=None,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
        "google/gemma-3-4b-it": {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34},
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        "microsoft/Phi-3-mini-4k-instruct": _shape(
            *_PHI3,
            (3072, 8192, 32, 32, 32),
            4096,
            32_064,
            original_max_position_embeddings=4096,
            rope_scaling=None,
            sliding_window=2047,
        ),
        "microsoft/Phi-3.5-mini-instruct": _shape(
            *_PHI3,
            (3072, 8192, 32, 32, 32),
            131_072,
            32_064,
            original_max_position_embeddings=4096,
            rope_scaling=_longrope(48),
            sliding_window=262_144,
        ),
        "microsoft/Phi-4-mini-instruct": _shape(
            *_PHI3,
            (3072, 8192, 32, 24, 8),
            131_072,
            200_064,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rope_scaling=_longrope(48),
            sliding_window=262_144,
            tie_word_embeddings=True,
        ),
        "microsoft/phi-4": _shape(
            *_PHI3,
            (5120, 17_920, 40, 40, 10),
            16_384,
            100_352,
            original_max_position_embeddings=16_384,
            rope_theta=250_000,
            rope_scaling=None,
            sliding_window=None,
        ),
        "allenai/OLMo-2-1124-7B-Instruct": _shape(
            "olmo2", "Olmo2ForCausalLM", (4096, 11_008, 32, 32, 32), 4096, 100_352, rope_theta=5e5, rms_norm_eps=1e-6
        ),
        "ibm-granite/granite-3.3-2b-instruct": _shape(
            "granite",
            "GraniteForCausalLM",
            (2048, 8192, 40, 32, 8),
            131_072,
            49_159,
            rope_theta=1e7,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
        "zai-org/GLM-4-9B-0414": _shape(
            "glm4",
            "Glm4ForCausalLM",
            (4096, 13_696, 40, 32, 2),
            32_768,
            151_552,
            head_dim=128,
            attention_bias=True,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
        ),
        "bigcode/starcoder2-3b": _shape(
            "starcoder2",
            "Starcoder2ForCausalLM",
            (3072, 12_288, 30, 24, 2),
            16_384,
            49_152,
            hidden_act="gelu_pytorch_tanh",
            norm_epsilon=1e-5,
            rope_theta=999_999.4,
            sliding_window=4096,
            use_bias=True,
        ),
        "CohereLabs/c4ai-command-r7b-12-2024": _shape(
            "cohere2",
            "Cohere2ForCausalLM",
            (4096, 14_336, 32, 32, 8),
            132_096,
            256_000,
            head_dim=128,
            layer_norm_eps=1e-5,
            logit_scale=0.25,
            rope_theta=50_000,
            sliding_window=4096,
            sliding_window_pattern=4,
            rope_scaling=None,
        ),
        "openai/gpt-oss-20b": _shape(
            "gpt_oss",
            "GptOssForCausalLM",
            (2880, 2880, 24, 64, 8),
            131_072,
            201_088,
            head_dim=64,
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention"] * 12,
            sliding_window=128,
            num_local_experts=32,
            num_experts_per_tok=4,
            rope_theta=150_000,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            quantization_config={"quant_method": "mxfp4"},
        ),
        "openai-community/gpt2": {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 12,
            "n_embd": 768,
        },
        "deepseek-ai/DeepSeek-V3": _shape(
            "deepseek_v3", "DeepseekV3ForCausalLM", (7168, 18_432, 61, 128, 128), 163_840, 129_280, n_routed_experts=256
        ),
        "google-t5/t5-base": {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "is_encoder_decoder": True,
        },
    }.items()
)
