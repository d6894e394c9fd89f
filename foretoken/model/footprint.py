"""What a checkpoint will take in memory, by its configuration and the headers of its files; no weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import InputError, UnsupportedModelError
from foretoken.kv.pool import bytes_per_token
from foretoken.model.architecture import ModelConfig
from foretoken.model.fields import Fields, shown
from foretoken.model.layer_tensors import layer_scores
from foretoken.model.loader import open_weights, parse_dtype, read_raw_config, stored_dtype
from foretoken.model.matrices.held import MatrixMemory
from foretoken.model.matrices.quant import check_quant
from foretoken.model.open import native_config
from foretoken.model.paged_cache import DEFAULT_BLOCK_SIZE
from foretoken.model.rope import TABLE_BLOCK
from foretoken.model.rope_json import CONTEXT_KEYS, UNBOUNDED_CONTEXT_TOKENS, context_tokens
from foretoken.model.weights import TensorSource, hf_tensors
from foretoken.plan.memory import ModelShape

# What other families call the same sizes.
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "context": CONTEXT_KEYS,
}


def shape_of(folder: Path, name: str, dtype: str = "auto", device: str = "cpu", weights: str = "auto") -> ModelShape:
    """The memory of the checkpoint in `folder` when it runs in `dtype` on `device`; `name` is what the user calls it.

    `weights` "int8" or "int4": its matrices are kept in that format, see `open_model`.

    Raises:
        CheckpointError: a file is missing or broken.
        UnsupportedModelError: no causal language model, or one whose cache does not follow from its configuration.
        InputError: unknown `dtype` or `weights`, or a pair that does not go together.
    """
    config, stored = native_config(folder), open_weights(folder)
    raw = read_raw_config(folder)
    kind = parse_dtype(dtype, stored_dtype(raw, stored, str(folder / "config.json")))
    if weights != "auto":
        check_quant(weights, kind, torch.device(device))
        if config is None:
            remedy = f"{name} runs through transformers, which has no quantised weights here; take bfloat16 or float32"
            raise InputError("weights", weights, remedy)
    if config is None:
        return _foreign_shape(name, raw, stored, kind)
    matrices = MatrixMemory(stored, config, kind, device, weights)
    # cos and sin of short sequences
    tables_bytes = 2 * len(config.ropes) * min(config.max_context_tokens, TABLE_BLOCK) * config.head_dim * kind.itemsize
    weight_bytes = matrices.total_bytes + _other_bytes(config, kind) + tables_bytes
    # As `open_model` keeps keys and values of a model whose matrices are multiplied in codes.
    kept = torch.float16 if matrices.in_codes and kind == torch.float32 and device == "cpu" else kind
    return ModelShape(
        name=name,
        weight_format=matrices.weight_format,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kept),
        row_bytes=_row_numbers(config) * kind.itemsize
        + (matrices.row_bytes if matrices.in_codes else 0)
        + _expert_row_bytes(config),
        mask_bytes=config.num_heads // config.num_kv_heads * kind.itemsize + 2 * kind.itemsize + 2,
        # Tables of cos and sin grow with the longest sequence.
        gather_bytes=bytes_per_token(1, config.num_kv_heads, config.head_dim, kind)
        + 2 * len(config.ropes) * config.head_dim * kind.itemsize,
        vocab_size=config.vocab_size,
        itemsize=kind.itemsize,
        max_context_tokens=config.max_context_tokens,
        block_tokens=DEFAULT_BLOCK_SIZE,
    )


def _other_bytes(config: ModelConfig, kind: torch.dtype) -> int:
    """Memory of norms and biases, and of the small matrices that stay in float32."""
    layers = (layer_scores(config, layer) for layer in range(config.num_layers))
    scores = dict(shape for matrices in layers for matrix in matrices.values() for shape in matrix.shapes)
    tensors = ((name, shape) for name, shape in hf_tensors(config) if name not in scores)
    numbers = sum(math.prod(shape) for name, shape in tensors if len(shape) == 1 or name.endswith("_norm.weight"))
    return numbers * kind.itemsize + sum(map(math.prod, scores.values())) * torch.float32.itemsize


def _row_numbers(config: ModelConfig) -> int:
    """Most numbers that a row has at a time: the residual stream and its norm, and either attention's or the MLP's."""
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    attention = (3 * (heads + 2 * groups) + 4 * heads) * size
    return 4 * config.hidden_size + max(attention, 5 * config.intermediate_size)


def _expert_row_bytes(config: ModelConfig) -> int:
    """What a row takes in float32 while it runs through experts: a result of each, scores, and one expert's MLP or the
    channels of all.
    """
    experts = config.experts
    if experts is None:
        return 0
    widest = max(experts.intermediate_size, experts.shared_size)
    num_slots = experts.num_active + (experts.shared_size > 0)
    channels = max(3 * widest, experts.num_active * experts.intermediate_size)
    return 4 * ((num_slots + 2) * config.hidden_size + experts.num_experts + channels)


def _foreign_shape(name: str, raw: Mapping[str, Any], weights: TensorSource, kind: torch.dtype) -> ModelShape:
    """Of a model that runs through transformers: the usual cache of keys and values, nothing rounded to blocks."""
    whole = Fields(raw, f"{name}: config.json")
    text = whole.fields("text_config") or whole
    sizes = {key: next((text.whole(other) for other in names if text.has(other)), 0) for key, names in _NAMES.items()}
    missing = next((key for key in ("hidden_size", "num_layers", "num_heads", "vocab_size") if not sizes[key]), None)
    if missing is not None:
        family = shown(raw.get("model_type"))
        raise UnsupportedModelError(
            f"{name}: config.json of a {family} model names no {missing}, so that its cache cannot be planned"
        )
    heads, vocab_size = sizes["num_heads"], sizes["vocab_size"]
    groups = text.whole_or("num_key_value_heads", heads)
    size = text.whole_or("head_dim", sizes["hidden_size"] // heads)
    return ModelShape(
        name=name,
        weight_bytes=sum(math.prod(weights.shape(tensor)) for tensor in weights.names) * kind.itemsize,
        kv_bytes_per_token=bytes_per_token(sizes["num_layers"], groups, size, kind),
        row_bytes=24 * sizes["hidden_size"] * kind.itemsize,  # four times the width in the MLP, a few copies
        mask_bytes=heads * kind.itemsize,
        gather_bytes=2 * heads * size * kind.itemsize,  # keys and values repeated for every query head
        vocab_size=vocab_size,
        itemsize=kind.itemsize,
        max_context_tokens=context_tokens(text.raw, sizes["context"] or UNBOUNDED_CONTEXT_TOKENS),
        block_tokens=1,
    )
