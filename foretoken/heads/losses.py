"""Losses of trained heads over the rows of a `Place`, and how often its draft tokens would be accepted.

p is the target's distribution, q the head's, alpha = sum_x min(p(x), q(x)) the probability that speculative sampling
accepts a token of the head. A loss sees p renormalised over the head's vocabulary; alpha is measured against the whole
p. A loss and its gradient are computed together for a few rows at a time, so that no [R, V] float32 outlives its chunk
and a chunk stays in the processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, HeadBatch, Place

LossKind = Literal["kl", "reverse_kl", "jsd", "tv", "nla", "lk"]
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)
_MAX_KEPT_BYTES = 256 << 20  # of the target's logits of a batch
_ACCEPTANCE_ROWS = 64  # whose distributions are held at once
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
        if not 0 <= self.extra_weight < math.inf:
            raise ConfigError("extra_weight", self.extra_weight, "must be a number, at least 0")
        if self.chunk_rows < 1:
            raise ConfigError("chunk_rows", self.chunk_rows, "must be at least 1")


# The target's logits [R, V], or [R, V_d] over a head's vocabulary, of the rows [R] of the flattened batch.
RowLogits: TypeAlias = Callable[[Tensor], Tensor]


def target_logits(batch: HeadBatch, output: Callable[[Tensor], Tensor]) -> RowLogits:
    """The target's logits of rows of `batch`: all computed once where they take little memory, as every place asks for
    nearly the same rows; else those that are asked for. `output` makes logits of normed rows [R, D].
    """
    normed = batch.normed.flatten(0, 1)  # [B * S, D]
    if not len(normed):
        return lambda rows: output(normed[rows])
    if len(normed) * output(normed[:1]).nbytes > _MAX_KEPT_BYTES:
        return lambda rows: output(normed[rows])
    whole = output(normed)  # [B * S, V]
    return lambda rows: whole[rows]


def compare(place: Place, target: RowLogits, config: LossConfig) -> Tensor:
    """Mean loss of one place's rows against the target's logits over the head's vocabulary; the gradient reaches
    `place.logits` only.
    """
    if not len(place.rows):
        return place.logits.float().sum()
    loss: Tensor = _Compared.apply(place.logits, place.rows, target, config)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def acceptance(place: Place, target: RowLogits, vocabulary: DraftVocabulary) -> Tensor:
    """alpha against the target's whole distribution, by row [R]."""
    wide = torch.promote_types(place.logits.dtype, torch.float32)
    alpha = torch.empty(len(place.rows), dtype=wide, device=place.logits.device)
    for start in range(0, len(alpha), _ACCEPTANCE_ROWS):
        part = slice(start, start + _ACCEPTANCE_ROWS)
        p = vocabulary.restrict(target(place.rows[part]).to(wide).softmax(-1))  # [C, V_d]
        alpha[part] = torch.minimum(p, place.logits[part].to(wide).softmax(-1)).sum(-1)
    return alpha


def same_argmax(place: Place, target: RowLogits, vocabulary: DraftVocabulary) -> Tensor:
    """Whether the likeliest token of head and target is the same, by row [R]."""
    return target(place.rows).argmax(-1) == vocabulary.to_target(place.logits.argmax(-1))


def weighted_loss(place: Place, compared: Tensor, config: LossConfig) -> Tensor:
    """What a place adds to the loss of a batch: its decayed mean `compared`, and what its kind of head adds."""
    loss = compared if place.extra_loss is None else compared + config.extra_weight * place.extra_loss
    return loss * config.place_decay**place.number


class _Compared(torch.autograd.Function):
    """`compare` with its gradient in closed form, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's own
        logits: Tensor,
        rows: Tensor,
        target: RowLogits,
        config: LossConfig,
    ) -> Tensor:
        count, dtype = len(rows), torch.promote_types(logits.dtype, torch.float32)
        loss = torch.empty(count, dtype=dtype, device=logits.device)
        gradient = torch.empty_like(logits) if logits.requires_grad else None
        rule = _RULES[config.kind]
        for start in range(0, count, config.chunk_rows):
            part = slice(start, start + config.chunk_rows)
            log_p, log_q = (one.to(dtype).log_softmax(-1) for one in (target(rows[part]), logits[part]))  # [C, V_d]
            p, q = log_p.exp(), log_q.exp()
            common = torch.minimum(p, q).sum(-1)  # [C]
            loss[part], slope = rule(_LossRows(log_p, log_q, p, q, common))
            if gradient is not None:
                gradient[part] = slope.div_(count).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return loss.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0], None, None, None)


class _LossRows(NamedTuple):
    """Both distributions over the head's vocabulary, `[C, V_d]`, and `common` = sum min(p, q), [C]."""

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor
    common: Tensor


# A rule returns the loss [C] and its derivative by the head's logits [C, V_d]. With f the loss and g = df/dq,
# df/dz = q (g - sum_x q(x) g(x)).
_Rule = Callable[[_LossRows], tuple[Tensor, Tensor]]


def _through_softmax(q: Tensor, by_q: Tensor) -> Tensor:
    weighted = q * by_q
    return weighted.sub_(q * weighted.sum(-1, keepdim=True))


def _kl(rows: _LossRows) -> tuple[Tensor, Tensor]:
    return (rows.p * (rows.log_p - rows.log_q)).sum(-1), rows.q - rows.p


def _reverse_kl(rows: _LossRows) -> tuple[Tensor, Tensor]:
    gap = rows.log_q - rows.log_p
    return (rows.q * gap).sum(-1), _through_softmax(rows.q, gap)


def _jsd(rows: _LossRows) -> tuple[Tensor, Tensor]:
    log_m = ((rows.p + rows.q) / 2).clamp_min(_TINY).log()
    to_q = rows.log_q - log_m
    value = ((rows.p * (rows.log_p - log_m)).sum(-1) + (rows.q * to_q).sum(-1)) / 2
    return value, _through_softmax(rows.q, to_q / 2)


def _tv(rows: _LossRows) -> tuple[Tensor, Tensor]:
    below = rows.q * (rows.q < rows.p)  # df/dq is -1 there, else 0
    return 1 - rows.common, (rows.q * below.sum(-1, keepdim=True)).sub_(below)


def _nla(rows: _LossRows) -> tuple[Tensor, Tensor]:
    _, slope = _tv(rows)
    alpha = rows.common.clamp_min(_TINY)
    return -alpha.log(), slope / alpha[:, None]


def _lk(rows: _LossRows) -> tuple[Tensor, Tensor]:
    lost, by_tv = _tv(rows)
    divergence, by_kl = _kl(rows)
    weight = torch.exp(-3 * rows.common)  # a constant of the step
    return weight * divergence + (1 - weight) * lost, by_tv.lerp_(by_kl, weight[:, None])


_RULES: dict[LossKind, _Rule] = {
    "kl": _kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "tv": _tv,
    "nla": _nla,
    "lk": _lk,
}
