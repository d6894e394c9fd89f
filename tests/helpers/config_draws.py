"""Configurations drawn over every key that changes what the four native families compute, written as they stand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints import randomise

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYERS = 3
_ABSENT = object()
# Keys that other families read, and old keys of these that nothing reads any more.
_IGNORED = {
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "query_pre_attn_scalar": 3,
    "pretraining_tp": 2,
    "attention_dropout": 0.3,
    "rope_interleaved": True,
    "alibi": True,
    "parallel_attn": True,
}


def draw(rng: random.Random, family: str) -> dict[str, Any]:
    """A `config.json` of `family` that transformers can build."""
    hidden, heads = rng.choice([(32, 4), (48, 4), (48, 2)])
    raw: dict[str, Any] = {
        "model_type": family,
        "vocab_size": 61,
        "hidden_size": hidden,
        "intermediate_size": rng.choice([40, 64]),
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "max_position_embeddings": rng.choice([48, 64, 256]),
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    head_dim = rng.choice([_ABSENT, 8, 12, 20])
    choices: dict[str, list[Any]] = {
        "head_dim": [16 if head_dim is _ABSENT and family == "qwen3" else head_dim],
        "tie_word_embeddings": [_ABSENT, True, False],
        "attention_bias": [_ABSENT, True, False],
        "mlp_bias": [_ABSENT, True, False],
        "hidden_act": [_ABSENT, "silu"],
        "rms_norm_eps": [_ABSENT, 1e-5, 1e-3],
        "partial_rotary_factor": [_ABSENT, _ABSENT, _ABSENT, 1.0],
    }
    choices |= {name: [_ABSENT] * 5 + [value] for name, value in _IGNORED.items()}
    raw |= {key: value for key, values in choices.items() if (value := rng.choice(values)) is not _ABSENT}
    raw |= _windows(rng, family)
    if family == "mistral" and "layer_types" in raw:  # without it transformers' Ministral cannot be built
        raw.setdefault("head_dim", hidden // heads)
    return raw | _rope(rng)


def _windows(rng: random.Random, family: str) -> dict[str, Any]:
    kinds = ["full_attention", "sliding_attention"]
    mixed = [rng.choice(kinds) for _ in range(LAYERS)]
    if family == "llama":  # reads none of it
        return rng.choice([{}, {}, {"layer_types": mixed, "sliding_window": 5}])
    if family == "mistral":
        window = rng.choice([{}, {"sliding_window": None}, {"sliding_window": 5}, {"sliding_window": 11}])
        types = rng.choice([{}, {"layer_types": None}, {"layer_types": mixed}])
        if types and window.get("sliding_window", 1) is None:
            return {"sliding_window": 7, **types}  # Ministral needs one for its masks
        return window | types
    if rng.random() < 0.3:
        return rng.choice(
            [
                {"sliding_window": 5},
                {"use_sliding_window": False, "layer_types": kinds[:1] * LAYERS},
                {"max_window_layers": 1},
            ]
        )
    layers = rng.choice(
        [
            {"layer_types": mixed},
            {"max_window_layers": rng.randint(0, LAYERS)},
            {"layer_types": None, "max_window_layers": 1},
        ]
    )
    return {"use_sliding_window": True, "sliding_window": rng.choice([5, 11]), **layers}


def _rope(rng: random.Random) -> dict[str, Any]:
    """Either spelling or both, the base inside or outside, the trained length inside, outside or nowhere."""
    kind = rng.choice(["default", "default", "linear", "dynamic", "yarn", "llama3"])
    original = rng.choice([16, 32])
    outside: dict[str, Any] = {}
    scaling: dict[str, Any] = {"type" if rng.random() < 0.3 else "rope_type": kind}
    if kind != "default":
        scaling["factor"] = rng.choice([1.0, 2.0, 4, 3.5])
    if kind == "llama3":
        scaling |= {"low_freq_factor": rng.choice([1.0, 2]), "high_freq_factor": rng.choice([4.0, 8.0])}
    if kind == "yarn":
        options = {
            "beta_fast": 16.0,
            "beta_slow": 2,
            "truncate": False,
            "attention_factor": 1.25,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
        }
        scaling |= {name: value for name, value in options.items() if rng.random() < 0.3}
    if kind in ("yarn", "llama3"):
        place = rng.choice(["inside", "outside", "both", "nowhere"])
        if place in ("inside", "both"):
            scaling["original_max_position_embeddings"] = original
        if place in ("outside", "both"):
            outside["original_max_position_embeddings"] = 24 if place == "both" else original
    theta = rng.choice([500.0, 10_000, 1e6])
    place = rng.choice(["inside", "outside", "both", "nowhere"])
    if place in ("inside", "both"):
        scaling["rope_theta"] = theta
    if place in ("outside", "both"):
        outside["rope_theta"] = 333.0 if place == "both" else theta
    spelling = rng.choice(
        ["rope_parameters", "rope_scaling", "both", "none"]
        if kind == "default"
        else ["rope_parameters", "rope_scaling", "both"]
    )
    if spelling == "both":  # which one wins matters
        return outside | {
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "linear", "factor": 7.0, "rope_theta": 77.0},
        }
    return outside | ({} if spelling == "none" else {spelling: scaling})


def write(folder: Path, raw: dict[str, Any], head: str, seed: int) -> Path:
    """Write `raw` as it stands with random weights; `head` of a tied model is "none", "equal" or "different" in the
    file.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    randomise(model, seed)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if raw.get("tie_word_embeddings"):
        if head == "none":
            del tensors["lm_head.weight"]
        elif head == "different":
            tensors["lm_head.weight"] = (
                torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
