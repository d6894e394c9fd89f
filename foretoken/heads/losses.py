"""Losses of trained heads over the rows of a `Place`, and how often its guesses would be accepted.

p is the target's distribution, q the head's, alpha = sum_x min(p(x), q(x)) the probability that speculative sampling
accepts a token of the head. A loss sees p renormalised over the head's vocabulary; alpha is reported against the whole
p. Value and gradient are computed together for a few rows at a time, so that no [R, V] float32 outlives its chunk and a
chunk stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import HeadBatch, Place
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.interface import SharedWeights

LossKind = Literal["kl", "reverse_kl", "jsd", "tv", "nla", "lk"]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
_TINY = 1e-30  # keeps the logarithm of a probability that float32 rounds to 0 finite


@dataclass(frozen=True)
class LossConfig:
    """How a head is compared with its target.

    `kind`: forward KL, reverse KL, Jensen-Shannon, total variation (1 - alpha), -log alpha, or `lk` (arXiv 2602.23881),
    KL that approaches total variation as alpha grows. Place k weighs `place_decay ** k`. `extra_weight` multiplies what
    a kind of head adds. `chunk_rows` rows are compared at a time.
    """

    kind: LossKind = "lk"
    place_decay: float = 0.8
    extra_weight: float = 1.0
    chunk_rows: int = 64

    def __post_init__(self) -> None:
        if self.kind not in LOSS_KINDS:
            raise ConfigError("kind", self.kind, f"choose one of {', '.join(LOSS_KINDS)}")
        if not 0 < self.place_decay <= 1:
            raise ConfigError("place_decay", self.place_decay, "must lie above 0 and be at most 1")
        if self.extra_weight < 0:
            raise ConfigError("extra_weight", self.extra_weight, "must be at least 0")
        if self.chunk_rows < 1:
            raise ConfigError("chunk_rows", self.chunk_rows, "must be at least 1")


class RowLogits(Protocol):
    """The target's logits of some rows of a batch."""

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [R] of the flattened batch -> logits [R, V]."""


@dataclass(frozen=True)
class Comparison:
    """A place's rows against the target: the mean loss, and by row alpha [R] and whether the likeliest token is the
    same [R].
    """

    loss: Tensor
    alpha: Tensor
    is_greedy: Tensor


def target_logits(batch: HeadBatch, target: SharedWeights) -> RowLogits:
    """The target's logits of rows of `batch`, computed for the rows that are asked for."""
    normed = batch.normed.flatten(0, 1)  # [B * S, D]

    def of(rows: Tensor) -> Tensor:
        return target.output_logits(normed[rows])

    return of


def compare(place: Place, target: RowLogits, vocabulary: DraftVocabulary, config: LossConfig) -> Comparison:
    """Loss and acceptance of one place; the gradient reaches `place.logits` only."""
    if not len(place.rows):
        none = place.logits.new_zeros(0, dtype=torch.float32)
        return Comparison(place.logits.float().sum(), none, none.bool())
    loss, alpha, is_greedy = _Compared.apply(place.logits, place.rows, target, vocabulary, config)  # type: ignore[no-untyped-call]
    return Comparison(loss, alpha, is_greedy)


def weighted_loss(place: Place, compared: Comparison, config: LossConfig) -> Tensor:
    """What a place adds to the loss of a batch: its decayed mean, and what its kind of head adds."""
    loss = compared.loss if place.extra_loss is None else compared.loss + config.extra_weight * place.extra_loss
    return loss * config.place_decay**place.number


class _Compared(torch.autograd.Function):
    """`compare` with its gradient in closed form, chunk by chunk."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401 - autograd's own
        logits: Tensor,
        rows: Tensor,
        target: RowLogits,
        vocabulary: DraftVocabulary,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, dtype = len(rows), torch.promote_types(logits.dtype, torch.float32)
        loss = torch.empty(count, dtype=dtype, device=logits.device)
        alpha, is_greedy = torch.empty_like(loss), torch.empty(count, dtype=torch.bool, device=logits.device)
        gradient = torch.empty_like(logits) if logits.requires_grad else None
        rule = _RULES[config.kind]
        for start in range(0, count, config.chunk_rows):
            part = slice(start, start + config.chunk_rows)
            theirs = target(rows[part]).to(dtype)  # [C, V]
            own = logits[part].to(dtype)  # [C, V_d]
            log_p, log_q = vocabulary.restrict(theirs).log_softmax(-1), own.log_softmax(-1)
            q = log_q.exp()
            loss[part], slope = rule(log_p, log_q, q)
            share = 0.0 if vocabulary.is_whole else _log_share(theirs, vocabulary)  # of p that the head can reach
            alpha[part] = torch.minimum((log_p + share).exp_(), q).sum(-1)
            is_greedy[part] = theirs.argmax(-1) == vocabulary.to_target(own.argmax(-1))
            if gradient is not None:
                gradient[part] = slope.div_(count).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(alpha, is_greedy)
        return loss.mean(), alpha, is_greedy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0], None, None, None, None)


def _log_share(theirs: Tensor, vocabulary: DraftVocabulary) -> Tensor:
    """log of the probability [C, 1] that the target gives to the head's vocabulary."""
    return vocabulary.restrict(theirs).logsumexp(-1, keepdim=True) - theirs.logsumexp(-1, keepdim=True)


# A rule returns the loss [C] and its derivative by the head's logits [C, V_d]. With f the loss and g = df/dq,
# df/dz = q (g - sum_x q(x) g(x)).
_Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _through_softmax(q: Tensor, by_q: Tensor) -> Tensor:
    return q * (by_q - (q * by_q).sum(-1, keepdim=True))


def _kl(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1), q - p


def _reverse_kl(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    gap = log_q - log_p
    return (q * gap).sum(-1), _through_softmax(q, gap)


def _jsd(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    log_m = ((p + q) / 2).clamp_min(_TINY).log()
    to_q = log_q - log_m
    return ((p * (log_p - log_m)).sum(-1) + (q * to_q).sum(-1)) / 2, _through_softmax(q, to_q / 2)


def _tv(log_p: Tensor, _log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    p = log_p.exp()
    return 1 - torch.minimum(p, q).sum(-1), _through_softmax(q, -(q < p).to(q.dtype))


def _nla(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    lost, slope = _tv(log_p, log_q, q)
    alpha = (1 - lost).clamp_min(_TINY)
    return -alpha.log(), slope / alpha[:, None]


def _lk(log_p: Tensor, log_q: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    lost, by_tv = _tv(log_p, log_q, q)
    divergence, by_kl = _kl(log_p, log_q, q)
    weight = torch.exp(-3 * (1 - lost))  # a constant of the step
    return weight * divergence + (1 - weight) * lost, torch.lerp(by_tv, by_kl, weight[:, None])


_RULES: dict[LossKind, _Rule] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "tv": _tv,
    "nla": _nla,
    "lk": _lk,
}
