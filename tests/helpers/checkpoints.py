"""Small random checkpoints, written by transformers itself, so that it can be the oracle of ours."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

END_OF_TEXT = "<|endoftext|>"

_SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}

_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.75,
        "attention_multiplier": 0.5,
        "logits_scaling": 0.25,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "starcoder2": {},
    "cohere": {"logit_scale": 2.0},
    "cohere2": {"logit_scale": 2.0, "sliding_window": 8, "num_hidden_layers": 4},
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 5, "head_dim": 16, "sliding_window": 9},
    "phi": {},
    "gpt_neox": {},
}

# Families whose configuration does not use the usual names.
_OWN_SHAPE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 97,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "opt": {
        "vocab_size": 97,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
    "mamba": {
        "vocab_size": 97,
        "hidden_size": 32,
        "state_size": 4,
        "num_hidden_layers": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bert": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_CUT = {"sliding_window": 8, "max_window_layers": 2}

# name -> (family, overrides): every option of the native decoder at least once.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 20}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN_ROPE}),
    "llama-yarn-options": (
        "llama",
        {
            "rope_parameters": _YARN_ROPE
            | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.7}
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-sliding": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen2-max-window-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": ("gemma2", {}),
    "gemma2-options": (
        "gemma2",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 2.0,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window_pattern": 2}),
    "gemma3-options": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100_000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0,
            "hidden_activation": "gelu",
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-options": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.2, 1.5, 1.6],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
            "hidden_size": 64,
            "original_max_position_embeddings": 160,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {}),
    "smollm3-options": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4-options": (
        "glm4",
        {"attention_bias": False, "rope_parameters": {"rope_theta": 5_000.0, "partial_rotary_factor": 0.25}},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-options": ("starcoder2", {"use_bias": False, "sliding_window": 9, "hidden_act": "gelu"}),
    "cohere": ("cohere", {}),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {}),
    "mixtral": ("mixtral", {}),
    "mixtral-sliding": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 6}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-options": (
        "qwen2_moe",
        {"qkv_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 2, "use_sliding_window": True, **_CUT},
    ),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-options": (
        "qwen3_moe",
        {"attention_bias": True, "mlp_only_layers": [0], "use_sliding_window": True, **_CUT},
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-options": (
        "gpt_oss",
        {
            "attention_bias": False,
            "swiglu_limit": 0.8,
            "swiglu_alpha": 1.2,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "cohere2-options": ("cohere2", {"sliding_window_pattern": 2, "attention_bias": True, "head_dim": 12}),
}

# Windows and their absence, every kind of norm, rotation and residual, sinks, experts: what runs usually where a test
# asks about a part of the decoder, not about reading a checkpoint. The rest in `make proof`.
USUAL = (
    *("llama", "mistral-sliding", "qwen2-layer-types", "qwen3", "gemma3-options", "phi3-options", "olmo2"),
    *("smollm3", "granite", "glm4", "starcoder2", "cohere2", "qwen3-moe", "gpt-oss"),
)
# One of each family.
ONE_OF_EACH = (
    *("llama", "mistral-sliding", "qwen2", "qwen3", "gemma2", "gemma3-options", "phi3-options", "olmo2"),
    *("smollm3-options", "granite", "glm", "glm4", "starcoder2", "cohere-qk-norm", "cohere2"),
    *("mixtral", "qwen2-moe-options", "qwen3-moe", "gpt-oss"),
)


def tiny_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` (a transformers model_type) into `folder` and return the folder.

    Every weight is random, norms and biases too, so that no mistake can hide behind a one or a zero. A process writes
    the same checkpoint once; from then on the files are copied, and the global generator is left as writing leaves it.
    """
    key = json.dumps([family, seed, str(dtype), shard_size, overrides], sort_keys=True, default=repr)
    if key not in _written:
        folder.mkdir(parents=True, exist_ok=True)
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        _write_checkpoint(folder, family, seed, dtype, shard_size, overrides)
        made = [path for path in folder.iterdir() if before.get(path.name) != path.stat().st_mtime_ns]
        if sum(path.stat().st_size for path in made) > _MAX_KEPT_BYTES:
            return folder
        _written[key] = _Written({path.name: path.read_bytes() for path in made}, torch.get_rng_state())
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _written[key].files.items():
        (folder / name).write_bytes(content)
    torch.set_rng_state(_written[key].rng_state)
    return folder


@dataclass(frozen=True)
class _Written:
    """The files of a checkpoint, and the state of the global generator after they were made."""

    files: dict[str, bytes]
    rng_state: torch.Tensor


_written: dict[str, _Written] = {}
_MAX_KEPT_BYTES = 2_000_000  # the tiny ones, of which there are hundreds; a large one is written once anyway


def _write_checkpoint(
    folder: Path, family: str, seed: int, dtype: torch.dtype, shard_size: str, overrides: Mapping[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings: Mapping[str, Any] = _OWN_SHAPE[family] if family in _OWN_SHAPE else _SHAPE | _FAMILY.get(family, {})
    config = AutoConfig.for_model(family, **(dict(settings) | overrides))
    torch.manual_seed(seed)
    maker = AutoModel if family == "bert" else AutoModelForCausalLM
    model = maker.from_config(config).eval()
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)


def variant(folder: Path, name: str, **options: Any) -> Path:
    """`tiny_checkpoint` of one of `VARIANTS`."""
    family, overrides = VARIANTS[name]
    return tiny_checkpoint(folder, family, **(overrides | options))


def related_pair(folder: Path, **options: Any) -> SimpleNamespace:
    """Folders of a llama of two layers, the `target`, and of the same without its second one, the `draft`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny_checkpoint(folder / "target", "llama", num_hidden_layers=2, **options)
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    with torch.no_grad():  # a second layer that matters less than the first: then its absence is no catastrophe
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            target.model.layers[1].get_submodule(name).weight.mul_(0.3)
    target.save_pretrained(folder / "target")
    draft = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "target", num_hidden_layers=1))
    draft.load_state_dict({name: w for name, w in target.state_dict().items() if ".layers.1." not in name})
    draft.save_pretrained(folder / "draft")
    return SimpleNamespace(target=folder / "target", draft=folder / "draft")


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights that make attention and MLP matter: unit-variance matrices, norms near one, small biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * (0.4 if "embed" in name or "wte" in name else parameter.shape[-1] ** -0.5))
        elif "norm" in name or "ln_" in name:
            parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.2 * noise)


def tiny_tokenizer(
    folder: Path, vocab_size: int = 300, texts: tuple[str, ...] = (), chat_template: str | None = None
) -> Path:
    """Write a byte-level BPE tokenizer (`tokenizer.json`, `tokenizer_config.json`) into `folder` and return the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        texts or ("def the return of self in a class and the list is empty\n" * 20, "für 猫 😀 naïve " * 20), trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def token_ids(count: int, vocab_size: int = 97, seed: int = 1) -> list[int]:
    """`count` random token ids."""
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def transformers_logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What transformers computes for `ids`: logits `[T, V]` of a causal checkpoint."""
    with torch.no_grad():
        logits: torch.Tensor = transformers_model(folder, dtype)(torch.tensor([ids])).logits[0]
    return logits


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in `folder` as transformers loads it, kept while its files do not change; not to be altered."""
    files = tuple(sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir()))
    return _loaded_by_transformers(folder, dtype, files)


@functools.lru_cache(maxsize=8)
def _loaded_by_transformers(folder: Path, dtype: torch.dtype, files: tuple[tuple[str, int, int], ...]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
