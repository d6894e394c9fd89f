"""Opens a trained head for a target: its folder, whether it fits, in the target's number format."""

from __future__ import annotations

from typing import TypeVar

import torch

from foretoken.composite_checks import A_HEAD
from foretoken.config import SpecConfig
from foretoken.draft.base import Factory
from foretoken.errors import ConfigError
from foretoken.heads.base import Head
from foretoken.heads.checkpoint import load_head
from foretoken.heads.kind import head_folder, head_kind
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import LanguageModel, SharesWeights
from foretoken.model.layers import Linear
from foretoken.model.open import native_config

_Head = TypeVar("_Head", bound=Head)


def open_head(factory: Factory, spec: SpecConfig, kind: type[_Head]) -> tuple[_Head, SharesWeights]:
    """The head that `spec` names, ready to run (its matrices packed, on a CPU that can), and the target, whose
    embedding and output matrix it uses.

    Raises:
        ConfigError: no head is named, one that another drafter runs, or a target without those parts.
        CheckpointError, UnsupportedModelError, MismatchError: see `load_head`.
    """
    if spec.head is None:
        raise ConfigError("head", None, f"drafter={spec.drafter!r} needs {A_HEAD}")
    folder = head_folder(spec.head)
    found = head_kind(folder)
    if found != kind.name:
        raise ConfigError("head", spec.head, f"is run by drafter={found!r}, not {spec.drafter!r}")
    target = factory.target
    if not isinstance(target, SharesWeights):
        raise ConfigError(
            "head", spec.head, "this target does not hand out its embedding and output matrix; draft without a head"
        )
    width, dtype = _embedding_of(target, spec.head)
    config = native_config(factory.folder) or _described(target, width)
    head = load_head(folder, config, dtype, target.device, factory.folder)
    assert isinstance(head, kind)
    head.requires_grad_(False).eval()
    for module in head.modules():
        if isinstance(module, Linear):
            module.pack()
    return head, target


@torch.inference_mode()
def _embedding_of(target: SharesWeights, head: str) -> tuple[int, torch.dtype]:
    """Width and number format of the target's embeddings.

    Raises:
        ConfigError: the output matrix reads rows of another width.
    """
    embedded = target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))
    try:
        target.output_logits(embedded)
    except RuntimeError as error:
        raise ConfigError(
            "head", head, "embedding and output matrix of this target differ in width; draft without a head"
        ) from error
    return embedded.shape[-1], embedded.dtype


def _described(target: LanguageModel, width: int) -> ModelConfig:
    """What a head must fit, of a target that runs through transformers; heads and head_dim are not compared."""
    return ModelConfig(
        model_type="other",
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=width,
        num_layers=target.num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=width,
        max_context_tokens=target.max_context_tokens,
    )
