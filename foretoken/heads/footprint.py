"""The memory of a draft model and of a trained head, from their files alone, as the engine would load them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from foretoken.config import QUANTISED
from foretoken.errors import ConfigError
from foretoken.heads.checkpoint import open_head, tensor_shapes
from foretoken.heads.formats.block import MARKOV_IN
from foretoken.heads.layers import LayeredHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.footprint import shape_of
from foretoken.model.loader import parse_dtype, read_config
from foretoken.model.matrices.codes import BLOCK_ROWS
from foretoken.model.matrices.quant import check_quant, grouped_bytes, head_format
from foretoken.model.names import model_folder
from foretoken.model.open import draft_weights
from foretoken.model.rope import TABLE_BLOCK
from foretoken.plan.memory import ModelShape

_TABLES = (MARKOV_IN, "embed_tokens.weight")  # a row at a time is read of them: they stay numbers


def draft_shape_of(name: str, dtype: str, target_format: str, draft_dtype: str, device: str) -> ModelShape:
    """A draft model as the engine loads it: in the target's format unless it has its own."""
    folder = model_folder(name)
    own = dtype if draft_dtype in (*QUANTISED, "auto") else draft_dtype
    return shape_of(folder, name, own, device, draft_weights(folder, draft_dtype, target_format))


def head_shape_of(name: str, target: str, shape: ModelShape, draft_dtype: str, device: str) -> ModelShape:
    """A trained head as the engine loads it: in the target's number format or, as its matrices are, quantised."""
    if draft_dtype in QUANTISED:
        check_quant(draft_dtype, torch.bfloat16, torch.device(device), field="draft_dtype")
    elif draft_dtype != "auto" and parse_dtype(draft_dtype).itemsize != shape.itemsize:
        raise ConfigError("draft_dtype", draft_dtype, "a head runs in its target's number format: take auto")
    held = draft_dtype
    if held == "auto":
        held = head_format(shape.weight_format, shape.itemsize, torch.device(device))
    target_folder = model_folder(target)
    return head_shape(model_folder(name), name, read_config(target_folder), shape, held, target_folder)


def head_shape(
    folder: Path,
    name: str,
    config: ModelConfig,
    target: ModelShape,
    weight_format: str,
    target_folder: Path | None = None,
) -> ModelShape:
    """The memory of the head in `folder` beside the target of `config` and shape `target`; `name` is what the user
    calls it.

    `weight_format` "int8" or "int4": its matrices are quantised. A row is taken to need what a row of the target needs.
    """
    network = open_head(folder, config, target_folder).network
    tensors = tensor_shapes(network).items()
    num_bytes = sum(_tensor_bytes(tensor, shape, weight_format, target.itemsize) for tensor, shape in tensors)
    num_kept = 0  # numbers of a position: keys and values of the head's layers, and the feature that they are made of
    if isinstance(network, LayeredHead):
        layer = network.layer_shape
        num_kept = 2 * layer.num_layers * layer.num_kv_heads * layer.head_dim + layer.hidden_size
        num_bytes += 2 * min(layer.max_context_tokens, TABLE_BLOCK) * layer.head_dim * target.itemsize  # cos and sin
    return replace(target, name=name, weight_bytes=num_bytes, kv_bytes_per_token=num_kept * target.itemsize)


def _tensor_bytes(name: str, shape: tuple[int, ...], weight_format: str, itemsize: int) -> int:
    """Memory of one tensor of a head, as `weights.pack` holds it."""
    if weight_format in QUANTISED and len(shape) == 2 and shape[0] >= BLOCK_ROWS and name not in _TABLES:
        return grouped_bytes(weight_format, *shape)
    return math.prod(shape) * itemsize
