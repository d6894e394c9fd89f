"""Evaluation on held-out text: bits per byte of a model, acceptance of a draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats of `tokens` [R] under `logits` [R, V]."""
    return F.cross_entropy(logits.float(), tokens)


def acceptance(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """alpha = sum_x min(p(x), q(x)) of every row, `[R]`."""
    return torch.minimum(teacher_logits.float().softmax(-1), logits.float().softmax(-1)).sum(-1)


def distillation(teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """Forward KL that approaches total variation as acceptance grows.

    lambda * KL(p || q) + (1 - lambda) * (1 - alpha) with lambda = exp(-3 alpha), alpha detached, per row: KL gives a
    gradient from random weights, total variation is the rejection probability (arXiv 2602.23881, LK hybrid).
    """
    log_q = logits.float().log_softmax(-1)
    log_p = teacher_logits.float().log_softmax(-1)
    p = log_p.exp()
    alpha = torch.minimum(p, log_q.exp()).sum(-1)  # [R]
    divergence = (p * (log_p - log_q)).sum(-1)  # [R]
    weight = torch.exp(-3 * alpha.detach())
    return (weight * divergence + (1 - weight) * (1 - alpha)).mean()


@dataclass(frozen=True)
class Agreement:
    """A draft against its target along real text: `sampled` is the mean of sum min(p, q), the probability that a
    sampled token is accepted at temperature 1; `greedy` the share of positions with equal argmax.
    """

    tokens: int
    sampled: float
    greedy: float


def logits_of(model: Decoder, batch: Tensor) -> Tensor:
    """Logits `[B * S, V]` of `batch` [B, S]."""
    rows, length = batch.shape
    positions = torch.arange(length, device=batch.device).repeat(rows)
    hidden = model(batch.reshape(-1), positions, PackedAttention(model.config, rows, length))
    return model.logits(hidden.last)


@torch.no_grad()
def loss_nats(model: Decoder, ids: Sequence[int], length: int = 1024) -> float:
    """Summed negative log-likelihood of `ids` in nats, in windows of `length` tokens in turn (the first is given)."""
    total, length = 0.0, min(length, model.config.max_context_tokens)
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16):
        for start in range(0, len(ids) - 1, length):
            window = torch.tensor(ids[start : start + length + 1], device=device)
            total += float(cross_entropy(logits_of(model, window[None, :-1]), window[1:])) * (len(window) - 1)
    return total


def bits_per_byte(model: Decoder, ids: Sequence[int], num_bytes: int) -> float:
    """`loss_nats` in bits per byte of the text that `ids` encode."""
    return loss_nats(model, ids) / math.log(2) / num_bytes


@torch.no_grad()
def agreement(target: Decoder, draft: Decoder, ids: Sequence[int], length: int = 1024) -> Agreement:
    """Compare the two distributions at every position of `ids`, in consecutive windows of `length` tokens."""
    sampled, greedy, count = 0.0, 0, 0
    length = min(length, target.config.max_context_tokens, draft.config.max_context_tokens)
    device = next(target.parameters()).device
    for start in range(0, len(ids), length):
        window = torch.tensor(ids[start : start + length], device=device)[None]
        p, q = logits_of(target, window), logits_of(draft, window)
        sampled += float(acceptance(p, q).sum())
        greedy += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += window.shape[1]
    return Agreement(count, sampled / count, greedy / count)
