"""The optimisers: Muon for matrices (Jordan et al. 2024) with AdamW for the rest, or AdamW alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from foretoken.errors import ConfigError

OptimizerKind = Literal["muon", "adamw"]
_PEAK = "peak_lr"
# Matrices over the vocabulary: their rows are tokens, of which a batch holds few, so they are no map to orthogonalise.
_OVER_TOKENS = ("embedding", "embed_tokens", "lm_head", "markov_w")


@dataclass(frozen=True)
class OptimizerConfig:
    """`matrix_rate` and `vector_rate` are peak learning rates. Muon (momentum, orthogonalised) trains the matrices
    between hidden states; embeddings, output matrices, norms and biases are trained by AdamW.
    """

    kind: OptimizerKind = "muon"
    matrix_rate: float = 4e-3
    vector_rate: float = 2e-3
    weight_decay: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in get_args(OptimizerKind):
            raise ConfigError("kind", self.kind, f"choose one of {', '.join(get_args(OptimizerKind))}")
        for name in ("matrix_rate", "vector_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("weight_decay", self.weight_decay, "must be a number, at least 0")


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> tuple[torch.optim.Optimizer, ...]:
    """Optimisers of the trainable parameters of `model`: one for the matrices, one for the rest."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    vocabulary = getattr(model, "vocabulary", None)
    tall = -1 if vocabulary is None else len(vocabulary.ids)  # Medusa's output matrices have numbers for names
    matrices = [
        p for name, p in trained if p.dim() == 2 and p.shape[0] != tall and not any(n in name for n in _OVER_TOKENS)
    ]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in trained if id(p) not in chosen]
    made: list[torch.optim.Optimizer] = []
    rate, decay = config.matrix_rate, config.weight_decay
    if matrices and config.kind == "muon":
        made.append(torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    elif matrices:
        made.append(torch.optim.AdamW(matrices, lr=rate, betas=(0.9, 0.95), weight_decay=decay))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=config.vector_rate, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in made:
        for group in optimizer.param_groups:
            group[_PEAK] = group["lr"]
    return tuple(made)


def set_rate(optimizers: Sequence[torch.optim.Optimizer], share: float) -> None:
    """Set every learning rate to `share` of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group[_PEAK] * share


def rate_share(step: int, num_steps: int, warmup_steps: int, decay_share: float, time_used: float = 0.0) -> float:
    """Learning rate at `step` as a share of the peak: warm-up, stable, and linear decay to zero in the last
    `decay_share` of the run.

    `time_used` is the share of the run's time that is over: the further one of steps and time counts.
    """
    warm = min(1.0, (step + 1) / max(1, warmup_steps))
    left = min(num_steps - step, num_steps * (1 - min(1.0, time_used)))
    return warm * min(1.0, left / max(1.0, num_steps * decay_share))
