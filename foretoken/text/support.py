"""Which tokens survive top_k, top_p and min_p however the logits of a row were rounded, and which may survive.

Two computations of the same row differ by rounding. A token whose logit lies close to the border of a filter can then
be inside one distribution and outside the other. The filters keep the most likely tokens, so a border is one number:
everything above it stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.text.sampling import coldest

# exp() of float32: a normal number above the first, 0 below the second, and what the kernel likes between the two.
_LOG_NORMAL, _LOG_ZERO = -87.3, -104.0
_SUM_ERROR = 2e-6  # of a float32 softmax over a whole vocabulary, and of the sums that top_p makes of it
_EXP_ERROR = 1e-6
_FEW = 1024  # tokens that are sorted first; only a flat distribution has more inside top_p


@dataclass(frozen=True)
class Support:
    """Tokens of rows, bool [n, V]: `certain` are kept under every rounding, `possible` under at least one."""

    certain: Tensor
    possible: Tensor


def support(logits: Tensor, rounding: Tensor, params: SamplingParams) -> Support:
    """The support of the distributions of `logits` [n, V] (processed) when two logits of row i may move against each
    other by `rounding[i]`.

    For a temperature above 0. Bounds, not estimates: `certain` may be too small and `possible` too large, never the
    other way.
    """
    assert not params.greedy
    temperature = coldest(params.temperature)
    scores = logits.double() / temperature  # [n, V]
    scores = scores - scores.amax(-1, keepdim=True)
    moves = rounding.double() / temperature + _EXP_ERROR  # [n]
    allowed = scores > -torch.inf
    if not params.filtered and bool(
        (moves < -_LOG_NORMAL).all()
    ):  # the best token is normal in any case, and nothing is compared with it
        return Support(
            allowed & (scores >= (_LOG_NORMAL + moves)[:, None]), allowed & (scores >= (_LOG_ZERO - moves)[:, None])
        )
    borders = [_borders(row, move, params) for row, move in zip(scores, moves.tolist(), strict=True)]
    surely, maybe = (
        torch.tensor([border[i] for border in borders], dtype=torch.float64, device=scores.device)[:, None]
        for i in (0, 1)
    )
    return Support(allowed & (scores >= surely), allowed & (scores >= maybe))


def _borders(scores: Tensor, move: float, params: SamplingParams) -> tuple[float, float]:
    """The least score `[V]` kept for certain (inf: none is), and the least that may be kept; the best score is 0."""
    ranked = scores.topk(min(len(scores), max(2, params.top_k + 1))).values.tolist()
    second = ranked[1] if len(ranked) > 1 else -math.inf
    is_best = (
        0.0 if second + move <= 0 else math.inf
    )  # the border that keeps only the best token, where that is certainly the best
    surely, maybe = min(_LOG_NORMAL + move, is_best), _LOG_ZERO - move
    if 0 < params.top_k < len(scores):
        surely, maybe = max(surely, ranked[params.top_k] + move), max(maybe, ranked[params.top_k - 1] - move)
    if params.top_p < 1.0:
        p_surely, p_maybe = _top_p_borders(scores, move, params.top_p, surely, maybe)
        surely, maybe = max(surely, min(p_surely, is_best)), max(maybe, min(p_maybe, -move))
    if params.min_p > 0.0:
        depth = -math.log(params.min_p)
        near_best = 0.0 if second + move <= depth else math.inf  # the best token is compared with the next one
        surely, maybe = max(surely, min(move - depth, near_best)), max(maybe, -depth - move)
    return surely, maybe


def _top_p_borders(scores: Tensor, move: float, top_p: float, surely: float, maybe: float) -> tuple[float, float]:
    """The borders of top_p alone, among tokens that top_k keeps for certain above `surely` and may keep above `maybe`;
    the best score is 0.

    A token stays when it and all below it hold more than 1 - top_p. The least they can come to: they lose half of
    `move`, all others gain as much, what is closer than `move` counts as above, and top_k keeps as little below as it
    can. The most: the reverse.
    """
    total, sure_total = (float(scores[scores >= border].exp().sum()) for border in (maybe, surely))
    for count in (_FEW, len(scores)):
        ordered = scores.topk(min(count, len(scores))).values.flip(0)
        ordered = ordered[ordered >= maybe]  # [m] rising, all tokens that top_k may keep or the likeliest of them
        own = ordered.exp()  # [m]
        below = torch.cat((own.new_zeros(1), own.cumsum(0)))  # [m + 1] what the lowest 0, 1, ... m hold
        held, doubtful = below[-1], below[int((ordered < surely).sum())]
        tail, sure_tail = max(0.0, total - float(held)), max(0.0, sure_total - float(held - doubtful))
        up_to = (
            below[torch.searchsorted(ordered, ordered + move, right=True)] + tail
        )  # [m] held by what lies no further above than `move`
        above = torch.minimum(held + tail - up_to, held - doubtful)
        is_open = _share(up_to, above, move) > 1 - top_p - _SUM_ERROR
        if not bool(is_open[0]):  # nor is any token of the tail, which needs no order then
            break

    low = below[torch.searchsorted(ordered, ordered - move)]  # [m] held by what lies further below than `move`
    far = (ordered - move > ordered[0]).double()  # [m] whether that is all of the tail too
    least = own + (low - doubtful).clamp(min=0) + far * sure_tail
    certain = ordered[_share(least, held - own - low + (1 - far) * tail, -move) > 1 - top_p + _SUM_ERROR]
    open_ = ordered[is_open]
    return float(certain[0]) if len(certain) else math.inf, float(open_[0]) if len(open_) else math.inf


def _share(below: Tensor, above: Tensor, move: float) -> Tensor:
    """`below / (below + above)`, both [m], after the two moved against each other by `move`."""
    return torch.sigmoid(below.log() - above.clamp(min=0).log() + move)
