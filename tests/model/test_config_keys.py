"""Every key that changes what a native family computes means here what it means to transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.config_json import config_from_hf
from foretoken.model.families import FAMILIES as NATIVE_FAMILIES
from foretoken.model.families import NATIVE_MODEL_TYPES
from foretoken.model.loader import load_decoder
from tests.helpers.checkpoints import token_ids, transformers_logits
from tests.helpers.config_draws import FAMILIES, draw, write
from tests.helpers.usual import some_of

LENGTH = 48  # longer than every window and trained length that is drawn, within every context
HEADS = ("none", "equal", "different")
_SLOWED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def compare(folder: Path, family: str, seed: int) -> None:
    """One drawn configuration: the logits of both implementations."""
    rng = random.Random(f"{family} {seed}")
    raw = draw(rng, family)
    write(folder, raw, rng.choice(HEADS), seed)
    ids = token_ids(LENGTH, 61, seed)
    expected = transformers_logits(folder, ids)
    decoder = load_decoder(folder, dtype="float32")
    with torch.no_grad():
        found = decoder.logits(
            decoder(torch.tensor(ids), torch.arange(LENGTH), PackedAttention(decoder.config, 1, LENGTH)).last
        )
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0, msg=lambda text: f"{raw}\n{text}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", some_of(range(10), range(4)))
def test_e2_drawn_configurations_give_the_logits_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    compare(tmp_path, family, seed)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # The masks go by the types alone; the switch is for layers without rotation where there are none.
        ("smollm3", {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False}),
        ("smollm3", {"layer_types": ["full_attention", "sliding_attention"]}),
        # Scalings by layer type, which these become, know only a trained length of their own.
        ("gemma3_text", {"rope_scaling": {"rope_type": "llama3", **_SLOWED}}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
    ],
)
def test_keys_that_single_families_read_in_their_own_way(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    raw: dict[str, Any] = {"model_type": family, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 61}
    raw |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 64}
    raw |= {"max_position_embeddings": 256, "sliding_window": 7, "original_max_position_embeddings": 32}
    raw |= {"query_pre_attn_scalar": 12, "no_rope_layer_interval": 2, "sliding_window_pattern": 2}
    raw |= {"tie_word_embeddings": False, **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"))}
    folder, ids = write(tmp_path, raw | options, "none", 1), token_ids(LENGTH, 61)
    decoder = load_decoder(folder, dtype="float32")
    with torch.no_grad():
        found = decoder(torch.tensor(ids), torch.arange(LENGTH), PackedAttention(decoder.config, 1, LENGTH)).last
        torch.testing.assert_close(decoder.logits(found), transformers_logits(folder, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("value", [None, "0", True, -0.1, 1.5, 1e308, 10**400, float("nan"), [0.0]])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("phi3", "resid_pdrop"), ("phi3", "embd_pdrop")),
        *(("starcoder2", "residual_dropout"), ("starcoder2", "embedding_dropout")),
    ],
)
def test_a_dropout_that_is_no_share_is_named(family: str, key: str, value: object) -> None:
    raw = {
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    assert config_from_hf(raw | {key: 0.1}) == config_from_hf(raw)
    with pytest.raises(CheckpointError, match=f"config.json: {key}=.* must be a number from 0 to 1, or absent"):
        config_from_hf(raw | {key: value})


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_of_another_activation_are_refused(family: str, activation: str) -> None:
    """They are left to transformers: our experts multiply by SiLU."""
    raw: dict[str, Any] = {"model_type": family, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    raw |= {"head_dim": 12}
    raw |= {"vocab_size": 300, "intermediate_size": 64, "moe_intermediate_size": 64, "num_key_value_heads": 2}
    raw |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 256}
    raw |= {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 64}
    assert config_from_hf(raw | {"hidden_act": "silu"}).experts is not None
    with pytest.raises(UnsupportedModelError, match=f"hidden_act='{activation}' of experts has no native"):
        config_from_hf(raw | {"hidden_act": activation})


def test_rope_parameters_of_gemma_3_that_transformers_reads_otherwise_are_refused() -> None:
    """Flat ones it ignores, with `rope_scaling` beside them it merges both, and it takes `rope_scaling` for flat."""
    raw: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 48, "num_attention_heads": 4, "vocab_size": 300}
    raw |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 64}
    raw |= {"max_position_embeddings": 256, "rope_local_base_freq": 500.0, "rope_theta": 1000.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    by_type = {"full_attention": linear | {"rope_theta": 1e3}, "sliding_attention": {"rope_theta": 500.0}}
    assert (
        config_from_hf(raw | {"rope_scaling": linear}).rope == config_from_hf(raw | {"rope_parameters": by_type}).rope
    )
    for found in (
        {"rope_parameters": linear},
        {"rope_parameters": by_type, "rope_scaling": linear},
        {"rope_scaling": by_type},
    ):
        with pytest.raises(UnsupportedModelError, match="not by layer type, or stand beside rope_scaling"):
            config_from_hf(raw | found)


@pytest.mark.parametrize("family", NATIVE_MODEL_TYPES)
def test_no_family_takes_an_activation_that_is_null(family: str) -> None:
    """transformers takes the key's absence for its own default, and refuses null."""
    key = NATIVE_FAMILIES[family].activation
    raw = {"model_type": family, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    raw |= {"vocab_size": 300, "intermediate_size": 64, "moe_intermediate_size": 64, "num_key_value_heads": 2}
    raw |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}
    raw |= {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 64, "max_position_embeddings": 256}
    with pytest.raises(CheckpointError, match=f"config.json: {key}=None must be one of silu, .*, or absent"):
        config_from_hf(raw | {key: None})
    with pytest.raises(StrictDataclassFieldValidationError):
        AutoConfig.for_model(family, **{key: None})
