"""Random Medusa heads and block drafters for a target, in memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.draft.block import BlockDrafter
from foretoken.draft.medusa import MedusaDrafter
from foretoken.heads.base import DraftVocabulary, Head
from foretoken.heads.block import BlockHead
from foretoken.heads.config import BlockConfig, MedusaConfig
from foretoken.heads.medusa import MedusaHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import SharesWeights

HEADS = ("medusa", "medusa:hydra", "block", "block:open", "block:cut")


def random_head(name: str, target: ModelConfig, seed: int = 0) -> Head:
    """`medusa:hydra` is sequential; `block:open` sees its whole block and predicts each slot's own token, `block:cut`
    predicts every second token and has a confidence.
    """
    whole = DraftVocabulary.whole(target.vocab_size)
    head: Head
    if name.startswith("medusa"):
        config = MedusaConfig(
            target.hidden_size, target.vocab_size, target.num_layers, 4, 2, name == "medusa:hydra", name == "medusa"
        )
        head = MedusaHead(config, whole)
    else:
        vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
        vocabulary = vocabulary if name == "block:cut" else whole
        layer = replace(target, model_type="qwen3", num_layers=2, qk_norm=True)
        taps = tuple(sorted({1, target.num_layers}))
        open_ = name == "block:open"
        head = BlockHead(
            BlockConfig(
                layer, target.hidden_size, target.num_layers, taps, len(vocabulary.ids), 6, 4, not open_,
                name == "block:cut", target.vocab_size - 2, not open_,
            ),
            vocabulary,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in head.named_parameters():
            scale = 0.8 if parameter.dim() > 1 else 0.2
            parameter.normal_(float("norm" in parameter_name), scale * parameter.shape[-1] ** -0.5, generator=generator)
    return head.requires_grad_(False)


def head_drafter(head: Head, target: SharesWeights) -> MedusaDrafter | BlockDrafter:
    """The drafter of a head."""
    if isinstance(head, MedusaHead):
        return MedusaDrafter(head, target)
    assert isinstance(head, BlockHead)
    return BlockDrafter(head, target)
