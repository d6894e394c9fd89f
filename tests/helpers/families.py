"""A small random checkpoint of any causal family that transformers registers, made from its configuration class
alone.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from tests.helpers.checkpoints import randomise

CONTEXT = 48
WINDOW = 20  # within the context, and longer than the texts of the trial at loading
VOCABULARY = 97

# The first pattern that matches the whole name of a field gives its value; fields of no pattern keep their default.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|decoder_vocab_size|vocab_size_per_layer_input|unpadded_vocab_size", VOCABULARY),
    (
        r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_target_positions|max_source_positions",
        CONTEXT,
    ),
    (
        r"sliding_window|sliding_window_size|window_size|local_attention|attention_window_size|attention_chunk_size",
        WINDOW,
    ),
    (
        r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|num_(de|en)coder_layers|num_blocks|depth|num_layers_per_stack",
        4,
    ),
    (r"num_kv_heads|kv_n_heads|num_key_value_heads|swa_num_key_value_heads|num_query_groups", 2),
    (
        r"num_attention_heads|n_heads?|num_heads|(de|en)coder_attention_heads|num_(de|en)coder_attention_heads|attention_heads|swa_num_attention_heads",
        4,
    ),
    (
        r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|input_embedding_size|output_embedding_size|word_embed_proj_dim|lru_width",
        32,
    ),
    (r"attention_hidden_size|hidden_size_global|out_hidden_size|vision_output_dim|projector_(in|out)put_dim", 32),
    (
        r"head_dim|dim_head|attention_head_size|kv_channels|swa_head_dim|v_head_dim|qk_nope_head_dim|d_kv|d_head|rotary_dim|index_head_dim|query_pre_attn_scalar",
        8,
    ),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim|backbone_hidden_size", 16),
    (r"kv_lora_rank|q_lora_rank|o_lora_rank|adapter_rank|hc_lowrank", 8),
    (
        r"(\w+_)?intermediate_size|(\w+_)?ffn_dim|\w*ffn_hidden_size|dim_ff|dff|d_ff|d_inner|intermediate_size_mlp|feed_forward_size|mlp_dim",
        48,
    ),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (
        r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers",
        1,
    ),
    (r"state_size|ssm_state_size|mamba_d_state", 8),
    (r"image_size|crop_size", 32),
    (r"patch_size", 16),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_ssm|mm_embed_dim|output_proj_dims", 64),
    (r"mamba_head_dim", 8),
    (r"vocab_offset|pronunciation_vocab_size|shape_vocab_size|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"linear_key_head_dim|linear_value_head_dim|linear_head_dim", 8),
    (r"linear_num_key_heads|linear_num_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"index_topk", 16),
    (r"(mamba_)?chunk_size|block_size|floor_scale", 8),
    (r"keep_window_size|local_attention_window_len|rel_extent", WINDOW),
    (r"index_block_size", 4),
    (r"index_topk_blocks", 2),
)

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
# What a family's configuration needs beyond the sizes.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {kind: dict(_ROPE) for kind in (_FULL, _SLIDING)}},
    "cwm": {"eos_token_id": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16},
    "dots3_note_text": {
        "head_dim": 16,
        "shared_experts_intermediate_size": 48,
        "sliding_window": WINDOW,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{
            f"swa_{name}": 8
            for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        },
        "swa_head_dim": 16,
    },
    "dots3_note_vision_encoder": {
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "adapter_in_dim": 32,
        "adapter_out_dim": 32,
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 6, "layer_types": [_SLIDING, _SLIDING, _FULL] * 2},
    "glm": {"eos_token_id": 1},
    "glm4": {"eos_token_id": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", _FULL, "conv", _FULL]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "phi4_multimodal": {"eos_token_id": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [6, 8], "axial_pos_embds_dim": [16, 16]},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": [_LINEAR, _LINEAR, "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(kind: type, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Arguments for the configuration class `kind` that make a model of some ten thousand weights; nested
    configurations too.
    """
    settings: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        default = one.default if one.default is not dataclasses.MISSING else None
        if isinstance(default, bool) or not isinstance(default, int):
            continue
        if one.name.endswith(("_token_id", "_token_index", "_token")):
            settings[one.name] = default % VOCABULARY
            continue
        size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, one.name)), None)
        if size is not None:
            settings[one.name] = size
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention has a key for every head
    return settings | (overrides or {})


def _parts(kind: Any) -> dict[str, Any]:
    """The configuration class of each nested configuration of `kind`, by name."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if hasattr(kind, "sub_configs_defaults"):
        specs = kind.sub_configs_defaults.items()
        return {
            name: CONFIG_MAPPING[one.model_type] if one.config_class is AutoConfig else one.config_class
            for name, one in specs
        }
    # Transformers 5.17 says of a part of no fixed class only what stands there by default, if anything does.
    parts = {name: type(getattr(kind(), name)) if one is AutoConfig else one for name, one in kind.sub_configs.items()}
    return {name: part for name, part in parts.items() if part is not type(None)}


def family_config(family: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    own = OVERRIDES.get(family, {})
    nested: dict[str, Any] = {}
    for name, part in _parts(kind).items():
        nested[name] = (
            shrunk(part, OVERRIDES.get(part.model_type, {})) | {"model_type": part.model_type} | own.get(name, {})
        )
    if any(one.name == "is_decoder" for one in dataclasses.fields(kind)):
        nested["is_decoder"] = True
    return kind(**shrunk(kind, own | nested))


def family_model(family: str, seed: int = 0) -> Any:
    """A small random model of `family`, as transformers builds it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family)).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def disturb(model: Any, seed: int = 1) -> Any:
    """The model with weights a little off: a draft that predicts many of its tokens, and not all."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.1)
    return model


def write_family(model: Any, family: str, folder: Path) -> Path:
    """Save `model` as a checkpoint of `family`, also where transformers built the text part only."""
    model.save_pretrained(folder)
    if model.config.model_type != family:
        family_config(family).save_pretrained(folder)
    return folder
