"""The trained head that a configuration names, ready to draft for its target."""

from __future__ import annotations

import torch

from foretoken.config import SpecConfig
from foretoken.draft.base import Factory
from foretoken.errors import ConfigError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head
from foretoken.heads.kind import head_kind
from foretoken.model.architecture import NATIVE_MODEL_TYPES
from foretoken.model.interface import SharesWeights
from foretoken.model.layers import Linear
from foretoken.model.open import model_folder, native_config


def open_head(factory: Factory, spec: SpecConfig, kind: str) -> tuple[Head, SharesWeights]:
    """The head of `spec.head` for drafter `kind`, in the target's number format and place, and the target.

    Raises:
        ConfigError: no head is named, it is of another kind, or the target runs through transformers.
        CheckpointError, MismatchError, UnsupportedModelError: see `load_head`.
    """
    if spec.head is None:
        raise ConfigError(
            "head", None, f"drafter={kind!r} needs a trained head: a folder, a hub id or reference:{kind}"
        )
    target, config = factory.target, native_config(factory.folder)
    if config is None or not isinstance(target, SharesWeights):
        reason = f"{factory.folder} runs through transformers, whose embedding and output matrix a head cannot use"
        raise ConfigError(
            "drafter", kind, f"{reason}; choose another drafter, or a checkpoint of {', '.join(NATIVE_MODEL_TYPES)}"
        )
    folder = model_folder(spec.head)
    found = head_kind(folder)
    if found != kind:
        raise ConfigError("head", spec.head, f"is a head of drafter={found!r}, not of {kind!r}; name that drafter")
    dtype = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device)).dtype
    head = load_head(folder, config, dtype, target.device, factory.folder).requires_grad_(False)
    for module in head.modules():
        if isinstance(module, Linear):
            module.pack()
    return head, target
