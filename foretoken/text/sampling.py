"""From logits to the target's distribution: temperature and filters, and a check that every row is finite.

Two computations of the same row differ by rounding. A token whose logit lies close to the border of a filter can then
be inside one distribution and outside the other (`Support`). The filters keep the most likely tokens, so a border is
one number: everything above it stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.kernels.sampling import Choice, kernel_for
from foretoken.transfer import to_device
from foretoken.verify import first_max

_SORT_WHOLE = 1024  # columns up to which sorting a whole row costs less than selecting what needs sorting
_COLDEST = 1e-20
_LOWEST_TEMPERATURE = 1e-37  # by a row's largest logit; `kernels/distribution.h` has the same
KERNEL_DTYPES = (torch.float32, torch.bfloat16)  # of logits that the compiled kernel takes


def target_probs(logits: Tensor, params: Sequence[SamplingParams], best: Tensor | None = None) -> Tensor:
    """The target's distribution at every row: logits [R, V] and the parameters of each row -> probabilities [R, V].

    Temperature 0 is a point at the argmax (lowest id on ties), `best` [R] where that is known. Otherwise softmax after
    the filters in the order temperature, top_k, top_p, min_p, each as in transformers. float32 (float64 for float64
    logits).
    """
    assert logits.shape[0] == len(params)
    if logits.dtype == torch.float16:  # beside a request with processors all rows come widened: the same bits then
        logits = widened(logits)
    kernel = kernel_for(logits, KERNEL_DTYPES)
    if kernel is not None and not all(choice.greedy for choice in params):
        if best is None and any(choice.greedy for choice in params):
            best = top_two(logits, wants_seconds=False).best
        return kernel.distributions(logits, choices_of(params, logits.shape[-1]), best)
    scores = widened(logits)
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, choice in enumerate(params):
        key = (0.0, 0, 1.0, 0.0) if choice.greedy else (choice.temperature, choice.top_k, choice.top_p, choice.min_p)
        groups.setdefault(key, []).append(row)
    if len(groups) == 1:
        return _distributions(scores, best, *next(iter(groups)))
    probs = torch.empty_like(scores)
    for key, members in groups.items():
        rows = to_device(members, logits.device)
        probs[rows] = _distributions(scores[rows], None if best is None else best[rows], *key)
    return probs


def draft_probs(logits: Tensor, params: Sequence[SamplingParams], top_ks: Sequence[int]) -> Tensor:
    """A draft's distribution at every row: `target_probs` over the `top_ks[r]` likeliest tokens only (0: all), at
    temperature 1 for greedy rows.

    Ties at the border stay in; the distribution is normalised over what is kept.
    """
    soft = [
        replace(choice, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if choice.greedy else choice
        for choice in params
    ]
    distribution = target_probs(logits, soft)
    cut = [row for row, top_k in enumerate(top_ks) if 0 < top_k < logits.shape[-1]]
    for row in cut:
        kept = torch.where(distribution[row] >= distribution[row].topk(top_ks[row]).values[-1], distribution[row], 0)
        distribution[row] = kept / kept.sum()
    return distribution


def check_finite(logits: Tensor) -> Tensor:
    """Whether each row can be sampled from: [R, V] -> bool [R], false for NaN, +inf, or nothing but -inf."""
    if logits.shape[0] == 0:
        return torch.ones(0, dtype=torch.bool, device=logits.device)
    return torch.isfinite(logits.amax(-1))  # amax hands NaN on; a lone -inf is a masked token


def without_broken(logits: Tensor) -> Tensor:
    """`[R, V]`, zeros in rows that cannot be sampled from; the input itself where a CPU sees that there are none."""
    finite = check_finite(logits)
    if logits.device.type == "cpu" and bool(finite.all()):  # elsewhere asking would wait for the device
        return logits
    return torch.where(finite[:, None], logits, torch.zeros_like(logits))


@dataclass(frozen=True)
class TopTwo:
    """Of rows of logits: `best` [R] the argmax of each (the first among equals), `peaks` [R] that logit, `seconds` [R]
    the largest of all others, None where nobody asked. A NaN counts as largest.
    """

    best: Tensor
    peaks: Tensor
    seconds: Tensor | None


def widened(logits: Tensor) -> Tensor:
    """What is computed with: `logits` in float32 (float64 for float64)."""
    return logits if logits.dtype == torch.float64 else logits.to(torch.float32)


def top_two(logits: Tensor, wants_seconds: bool = True) -> TopTwo:
    """The two best of each row of `logits` [R, V], compared in 32 bits or more."""
    kernel = kernel_for(logits, KERNEL_DTYPES)
    if kernel is not None:
        places, tops = kernel.top_two(logits)
        return TopTwo(places, tops[0], tops[1])
    scores = widened(logits)
    best = first_max(scores)  # [R]
    place = best.unsqueeze(-1)  # [R, 1]
    peaks = scores.gather(-1, place)  # [R, 1]
    if not wants_seconds:
        return TopTwo(best, peaks.squeeze(-1), None)
    # Hiding the best for a moment costs less than a copy, and both less than sorting two numbers out of each row.
    seconds = scores.scatter_(-1, place, -torch.inf).amax(-1)  # [R]
    scores.scatter_(-1, place, peaks)
    return TopTwo(best, peaks.squeeze(-1), seconds)


def near_ties_of(peaks: Sequence[float], seconds: Sequence[float], dtype: torch.dtype) -> dict[int, float]:
    """Rows whose two best logits, host copies of `top_two`, lie at most one rounding unit of `dtype` apart, with their
    gaps.

    Such a row's argmax may change with the number of rows computed at once, because sums are then rounded in another
    order. `dtype` is what the model computed in; in float32 and float64 no row counts.
    """
    unit, pairs = torch.finfo(dtype).eps, zip(peaks, seconds, strict=True)
    return {row: peak - second for row, (peak, second) in enumerate(pairs) if peak - second <= unit * abs(peak)}


def coldest(temperature: float) -> float:
    """The temperature that logits are divided by: below 1e-20 nothing changes but that float32 may overflow."""
    return max(temperature, _COLDEST)


def choices_of(params: Sequence[SamplingParams], vocab_size: int) -> list[Choice]:
    """How the compiled kernel samples each row of `vocab_size` tokens."""
    made: dict[int, Choice] = {}
    for choice in params:
        if id(choice) not in made:
            dropped = 1 - choice.top_p if choice.top_p < 1 else -1.0
            top_k = min(choice.top_k, vocab_size)  # C would take another number's last 64 bits
            temperature = 0.0 if choice.greedy else coldest(choice.temperature)
            made[id(choice)] = Choice(top_k, temperature, dropped, choice.min_p)
    return [made[id(choice)] for choice in params]


def _distributions(
    scores: Tensor, best: Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """One distribution per row for rows that share their parameters: [R, V] -> [R, V]; `best` [R] where it is known."""
    if temperature == 0.0:
        return torch.zeros_like(scores).scatter_(-1, (first_max(scores) if best is None else best).unsqueeze(-1), 1)
    scores = scores / _fitting(scores, coldest(temperature))
    if top_k > 0:
        kth = torch.topk(scores, min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        scores = _filter_top_p(scores, top_p)
    if min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def _fitting(scores: Tensor, temperature: float) -> Tensor | float:
    """`temperature`, for each row of [R, V] not so low that its largest score would be infinite: [R, 1]. Numbers so
    large lie so far apart that nothing but the largest has a weight under either.
    """
    if temperature >= 1:
        return temperature
    return (scores.amax(-1, keepdim=True).abs() * _LOWEST_TEMPERATURE).clamp(min=temperature)


def _filter_top_p(scores: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens that holds `top_p` of the mass, at least one; the rest becomes -inf.

    Of equally likely tokens at the border the lowest ids go, so that the distribution is a function of the row alone.
    """
    if scores.shape[-1] <= _SORT_WHOLE or scores.device.type != "cpu":
        ordered, ids = torch.sort(scores, stable=True)
        drop = ordered.softmax(-1).cumsum(-1) <= 1 - top_p  # ascending: the unlikely tail goes
        drop[..., -1:] = False
        return scores.masked_fill(torch.zeros_like(drop).scatter_(-1, ids, drop), -torch.inf)
    # Sorting a real vocabulary takes milliseconds per row. Tokens below (1 - top_p) / V hold less than 1 - top_p
    # together, so they all go, and only the others need an order.
    probs = scores.softmax(-1)
    sure = probs < (1 - top_p) / (2 * scores.shape[-1])
    out = scores.masked_fill(sure, -torch.inf)
    for row in range(scores.shape[0]):
        ids = (~sure[row]).nonzero().squeeze(-1)  # [C]
        ordered, order = torch.sort(probs[row, ids], stable=True)
        drop = (probs[row] * sure[row]).sum() + ordered.cumsum(-1) <= 1 - top_p
        drop[-1:] = False
        out[row, ids[order[drop]]] = -torch.inf
    return out


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
    # Without filters, and the best token normal in any case, nothing is compared with it.
    if not params.filtered and bool((moves < -_LOG_NORMAL).all()):
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
    # The border that keeps only the best token, where that is certainly the best.
    is_best = 0.0 if second + move <= 0 else math.inf
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
        # [m] held by what lies no further above than `move`
        up_to = below[torch.searchsorted(ordered, ordered + move, right=True)] + tail
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
