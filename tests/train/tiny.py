"""A tiny target and a text that it can predict, for the training of heads in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from foretoken.heads.losses import LossConfig
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder
from foretoken.train.frozen_target import FrozenTarget, StateCache
from foretoken.train.head_data import HeadData, TokenText
from foretoken.train.head_recipes import AdapterShape, BlockShape, EagleShape, HeadShape, MedusaShape, new_head
from foretoken.train.head_train_config import HeadTrainConfig
from foretoken.train.head_trainer import HeadTrainer
from foretoken.train.optimizer import OptimizerConfig
from foretoken.train.parallel import Ranks
from tests.helpers.checkpoints import randomise

VOCABULARY = 50
CONFIG = HeadTrainConfig(
    tokens=32 * 12,
    batch_windows=2,
    length=16,
    num_places=3,
    warmup_steps=1,
    save_every_s=1e9,
    report_every_steps=1,
    validate_every_steps=6,
    validate_windows=3,
    loss=LossConfig(chunk_rows=8),
    optimizer=OptimizerConfig("adamw", matrix_rate=1e-2, vector_rate=1e-2),
)
SHAPES: dict[str, HeadShape] = {
    "eagle": EagleShape(draft_vocab_size=30),
    "eagle1": EagleShape(version=1),
    "medusa": MedusaShape(num_heads=3, has_own_output=True),
    "block": BlockShape(num_layers=1, block_size=3, markov_rank=4),
    "adapter": AdapterShape(exit_layer=3),
}


def tiny_text() -> HeadData:
    """A text that repeats with a period of 13: what any target says of it is easy to learn."""
    ids = np.tile(np.random.default_rng(0).integers(1, VOCABULARY, 13), 40).astype(np.uint16)
    return HeadData(TokenText.running(ids), TokenText.running(ids[:200]), "a text with a period")


def tiny_target() -> FrozenTarget:
    """A target with random weights and peaked distributions; its layers are just enough for three taps."""
    config = ModelConfig("llama", VOCABULARY, 32, 48, 7, 2, 1, 16, 64, tie_embeddings=True, eos_token_ids=(0,))
    model = Decoder(config)
    randomise(model)
    return FrozenTarget(model)


def tiny_trainer(
    folder: Path,
    target: FrozenTarget,
    kind: str = "eagle",
    config: HeadTrainConfig = CONFIG,
    seed: int = 0,
    ranks: Ranks | None = None,
    states: StateCache | None = None,
) -> HeadTrainer:
    """A trainer of a new head; `seed` is that of its weights."""
    data = tiny_text()
    head = new_head(SHAPES[kind], target, data.train.counts(VOCABULARY), [0], seed)
    kept: list[dict[str, torch.Tensor]] = []

    def keep() -> None:
        kept.append({name: value.clone() for name, value in head.state_dict().items()})

    trainer = HeadTrainer(head, target, data, config, folder, keep, ranks, states)
    trainer.kept = kept  # type: ignore[attr-defined]
    return trainer
