"""Training losses: next-token cross-entropy, and acceptance by a teacher.

p is the teacher's distribution, q the student's, alpha = sum min(p, q) the probability that speculative sampling
accepts the student's token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
