"""How many tokens a step would emit with a head: its acceptance place by place along held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.heads.base import HeadBatch
from foretoken.heads.losses import acceptance, same_argmax, target_logits
from foretoken.train.draft_student import Student
from foretoken.train.frozen_target import FrozenTarget


@dataclass(frozen=True)
class HeadAcceptance:
    """A head along real text, from every position at which it drafts all its places.

    `sampled[k]` is the mean of alpha = sum min(p, q) at place k, `greedy[k]` the share of equal argmax.
    `emitted_sampled` and `emitted_greedy` are 1 + sum_k prod_{i <= k} of these, by position and then averaged: tokens
    per step at temperature 1 and 0, if the text goes on as it does here.
    """

    num_positions: int
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    emitted_sampled: float
    emitted_greedy: float


@torch.no_grad()
def measure_head(head: Student, target: FrozenTarget, batches: Iterable[HeadBatch], num_places: int) -> HeadAcceptance:
    """Acceptance of `num_places` places along `batches`, at most those that the head has."""
    sampled, greedy = [], []
    head.eval()
    for number, batch in enumerate(batches):
        alpha, match = _by_position(head, target, batch, num_places, seed=number)
        whole = ~alpha.isnan().any(0)
        sampled.append(alpha[:, whole])
        greedy.append(match[:, whole])
    head.train()
    alpha, match = torch.cat(sampled, 1), torch.cat(greedy, 1)  # [K, R]
    if not alpha.shape[1]:
        return HeadAcceptance(0, (), (), 1.0, 1.0)
    return HeadAcceptance(
        alpha.shape[1],
        tuple(alpha.mean(1).tolist()),
        tuple(match.mean(1).tolist()),
        1 + float(alpha.cumprod(0).sum(0).mean()),
        1 + float(match.cumprod(0).sum(0).mean()),
    )


def _by_position(
    head: Student, target: FrozenTarget, batch: HeadBatch, num_places: int, seed: int
) -> tuple[Tensor, Tensor]:
    """alpha and equal argmax by place and first draft position, each `[K, B * S]`, NaN where there is none."""
    alphas: list[Tensor] = []
    matches: list[Tensor] = []
    with target.autocast():
        logits = target_logits(batch, target.decoder.output_logits)
        for place in head.places(batch, target.decoder, num_places, seed):
            alpha = acceptance(place, logits, head.vocabulary)
            match = same_argmax(place, logits, head.vocabulary)
            for found, values in ((alphas, alpha), (matches, match)):
                line = torch.full((batch.wanted[:, 1:].numel(),), float("nan"), device=values.device)
                line[place.rows - place.number] = values.float()
                found.append(line)
    return torch.stack(alphas), torch.stack(matches)
