"""Directories of small random heads for a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from foretoken.heads.adapter import ExitAdapter
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.checkpoint import save_head
from foretoken.heads.config import EagleConfig, ExitAdapterConfig
from foretoken.heads.eagle import EagleHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.loader import read_config
from tests.helpers.checkpoints import randomise
from tests.helpers.random_heads import random_head

KINDS = ("eagle", "eagle:1", "medusa", "block")


def eagle_head(
    target: ModelConfig, version: int = 3, seed: int = 0, hidden_size: int | None = None, **options: bool
) -> EagleHead:
    """A random EAGLE head, as wide as the target unless told; version 3 knows all tokens but every fifth."""
    layer = replace(
        target, model_type="llama", num_layers=1, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
        sliding_window=(), hidden_size=hidden_size or target.hidden_size,
    )  # fmt: skip
    ids = torch.arange(target.vocab_size)
    taps = (target.num_layers,)
    if version == 3:
        ids = ids[ids % 5 != 3]
        taps = tuple(sorted({1, max(1, target.num_layers // 2), target.num_layers}))
    config = EagleConfig(version, layer, target.hidden_size, target.num_layers, taps, len(ids), **options)
    head = EagleHead(config, DraftVocabulary(ids, target.vocab_size))
    randomise(head, seed)
    return head.requires_grad_(False)


def exit_adapter(target: ModelConfig, exit_layer: int = 1, seed: int = 0) -> ExitAdapter:
    """A random early-exit adapter."""
    config = ExitAdapterConfig(target.hidden_size, target.vocab_size, target.num_layers, exit_layer, 12)
    adapter = ExitAdapter(config, DraftVocabulary.whole(target.vocab_size))
    randomise(adapter, seed)
    return adapter.requires_grad_(False)


def tiny_head(folder: Path, target_folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a random head of `kind` for the target in a folder, and return the head's folder."""
    target = read_config(target_folder)
    head: Head
    if kind == "early_exit:adapter":
        head = exit_adapter(target, seed=seed)
    elif kind.startswith("eagle"):
        head = eagle_head(target, 1 if kind == "eagle:1" else 3, seed, 24 if kind == "eagle:narrow" else None)
    else:
        head = random_head(kind, target, seed)
    save_head(head, folder, target, target_folder)
    return folder
