"""What a trained head takes in memory beside its target, from its configuration alone; no weight is loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from foretoken.config import QUANTISED
from foretoken.heads.checkpoint import draft_vocab_size, head_tensors, open_head_files, read_head_config
from foretoken.heads.config import ExitAdapterConfig, HeadConfig, MedusaConfig
from foretoken.heads.formats.block import MARKOV_IN
from foretoken.heads.kind import head_kind
from foretoken.model.architecture import ModelConfig
from foretoken.model.matrices.codes import BLOCK_ROWS
from foretoken.model.matrices.quant import grouped_bytes
from foretoken.model.rope import TABLE_BLOCK
from foretoken.plan.memory import ModelShape

_TABLES = (MARKOV_IN, "embed_tokens.weight")  # a row at a time is read of them: they stay numbers


def head_shape(folder: Path, name: str, config: ModelConfig, target: ModelShape, weight_format: str) -> ModelShape:
    """The memory of the head in `folder` beside the target of `config` and shape `target`; `name` is what the user
    calls it.

    `weight_format` "int8" or "int4": its matrices are quantised. A row is taken to need what a row of the target needs.

    Raises:
        CheckpointError, MismatchError, UnsupportedModelError, ConfigError: see `checkpoint.load_head`.
    """
    kind = head_kind(folder)
    fields, weights = open_head_files(folder)
    own = read_head_config(fields, kind, config, frozenset(weights.own_names))
    tensors = head_tensors(own, draft_vocab_size(own, fields))
    sizes = [tensor_bytes(tensor, shape, weight_format, target.itemsize) for tensor, shape in tensors.items()]
    return replace(
        target,
        name=name,
        weight_bytes=sum(sizes) + _table_numbers(own) * target.itemsize,
        kv_bytes_per_token=_numbers_per_token(own) * target.itemsize,
    )


def tensor_bytes(name: str, shape: tuple[int, ...], weight_format: str, itemsize: int) -> int:
    """Memory of one tensor of a head, as `weights.pack` holds it."""
    if weight_format in QUANTISED and len(shape) == 2 and shape[0] >= BLOCK_ROWS and name not in _TABLES:
        return grouped_bytes(weight_format, *shape)
    return math.prod(shape) * itemsize


def _numbers_per_token(config: HeadConfig) -> int:
    """Kept of a position: keys and values of the head's layers, and the feature that they are made of."""
    if isinstance(config, MedusaConfig | ExitAdapterConfig):
        return 0
    layer = config.layer
    return 2 * layer.num_layers * layer.num_kv_heads * layer.head_dim + layer.hidden_size


def _table_numbers(config: HeadConfig) -> int:
    """cos and sin of short sequences."""
    if isinstance(config, MedusaConfig | ExitAdapterConfig):
        return 0
    return 2 * min(config.layer.max_context_tokens, TABLE_BLOCK) * config.layer.head_dim
