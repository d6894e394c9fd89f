"""Heads with random weights for a described target, to be written and read: no forward pass is needed of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import (
    BlockConfig,
    EagleConfig,
    ExitAdapterConfig,
    HeadConfig,
    MedusaConfig,
    default_taps,
)
from foretoken.model.architecture import ModelConfig
from foretoken.model.config_json import config_from_hf

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
TARGET = config_from_hf(
    {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA3,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "torch_dtype": "bfloat16",
    }
)
CUT = 30  # tokens of a cut vocabulary


def eagle_config(version: int = 3, target: ModelConfig = TARGET, layers: int = 1, **options: Any) -> EagleConfig:
    """An EAGLE head's configuration, with the target's whole vocabulary unless told otherwise."""
    taps = options.get("taps") or (default_taps(target.num_layers) if version == 3 else (target.num_layers,))
    settings: dict[str, Any] = {
        "version": version,
        "layer": replace(target, model_type="llama", num_layers=layers, tie_embeddings=False),
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "taps": taps,
        "draft_vocab_size": target.vocab_size,
    }
    return EagleConfig(**(settings | options))


def block_config(target: ModelConfig = TARGET, layers: int = 2, **options: Any) -> BlockConfig:
    """A block drafter's configuration."""
    settings: dict[str, Any] = {
        "layer": replace(target, model_type="qwen3", num_layers=layers, qk_norm=True, tie_embeddings=False),
        "target_hidden_size": target.hidden_size,
        "target_num_layers": target.num_layers,
        "taps": (1, 4, 7),
        "draft_vocab_size": target.vocab_size,
        "block_size": 4,
        "markov_rank": 8,
        "mask_token": 5,
    }
    return BlockConfig(**(settings | options))


def adapter_config(target: ModelConfig = TARGET, **options: Any) -> ExitAdapterConfig:
    """An early-exit adapter's configuration."""
    settings: dict[str, Any] = {"exit_layer": 2, "intermediate_size": 40, "norm_eps": target.norm_eps}
    return ExitAdapterConfig(target.hidden_size, target.vocab_size, target.num_layers, **(settings | options))


def medusa_config(target: ModelConfig = TARGET, **options: Any) -> MedusaConfig:
    """Medusa heads' configuration."""
    return MedusaConfig(target.hidden_size, target.vocab_size, target.num_layers, **options)


HEADS: Mapping[str, HeadConfig] = {
    "eagle3": eagle_config(draft_vocab_size=CUT),
    "eagle3-whole": eagle_config(has_own_output=True),
    "eagle3-shared-output": eagle_config(),
    "eagle3-taps": eagle_config(taps=(1, 3, 6), draft_vocab_size=CUT),
    "eagle3-norms": eagle_config(
        draft_vocab_size=CUT, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True
    ),
    "eagle3-bias-2-layers": eagle_config(layers=2, fc_bias=True, draft_vocab_size=CUT),
    "eagle3-another-width": eagle_config(layer=replace(eagle_config().layer, hidden_size=32), draft_vocab_size=CUT),
    "eagle3-qwen3": eagle_config(
        layer=replace(eagle_config().layer, model_type="qwen3", qk_norm=True), draft_vocab_size=CUT
    ),
    "eagle1": eagle_config(1),
    "eagle1-qwen2": eagle_config(1, layer=replace(eagle_config(1).layer, model_type="qwen2", qkv_bias=True)),
    "eagle1-bias": eagle_config(1, fc_bias=True, layers=2),
    "medusa": medusa_config(),
    "medusa-2-blocks": medusa_config(num_heads=2, num_blocks=2),
    "medusa-shared-output": medusa_config(num_heads=2, has_own_output=False),
    "hydra": medusa_config(num_heads=3, is_sequential=True),
    "dspark": block_config(has_confidence=True),
    "dspark-cut": block_config(draft_vocab_size=CUT),
    "dflash": block_config(markov_rank=0, is_causal=False, predicts_at_anchor=False),
    "adapter": adapter_config(),
}


def vocabulary_of(config: HeadConfig, seed: int = 0) -> DraftVocabulary:
    """A random vocabulary of the size that `config` has."""
    if isinstance(config, MedusaConfig | ExitAdapterConfig):
        return DraftVocabulary.whole(config.vocab_size)
    whole, size = config.layer.vocab_size, config.draft_vocab_size
    if size == whole:
        return DraftVocabulary.whole(whole)
    ids = torch.randperm(whole, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    return DraftVocabulary(ids, whole)


@torch.no_grad()
def stored_head(name_or_config: str | HeadConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Head:
    """A head of `HEADS`, or of a configuration, every weight random, norms and biases too."""
    config = HEADS[name_or_config] if isinstance(name_or_config, str) else name_or_config
    head = make_head(config, vocabulary_of(config, seed)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        spread = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        parameter.copy_(spread * noise + (1.0 if "norm" in name and parameter.dim() == 1 else 0.0))
    return head
