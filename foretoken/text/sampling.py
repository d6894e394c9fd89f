"""From logits to the target's distribution: temperature and filters, and a check that every row is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.kernels.sampling import Choice, kernel_for
from foretoken.transfer import to_device, to_host
from foretoken.verify import draw, first_max

_SORT_WHOLE = 1024  # columns up to which sorting a whole row costs less than selecting what needs sorting
_COLDEST = 1e-20


def target_probs(logits: Tensor, params: Sequence[SamplingParams], best: Tensor | None = None) -> Tensor:
    """The target's distribution at every row: logits [R, V] and the parameters of each row -> probabilities [R, V].

    Temperature 0 is a point at the argmax (lowest id on ties), `best` [R] where that is known. Otherwise softmax after
    the filters in the order temperature, top_k, top_p, min_p, each as in transformers. float32 (float64 for float64
    logits).
    """
    assert logits.shape[0] == len(params)
    scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    kernel = kernel_for(scores)
    if kernel is not None and not all(choice.greedy for choice in params):
        return kernel.distributions(scores, _choices(scores, params, best))
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


def near_ties(logits: Tensor, dtype: torch.dtype, best: Tensor | None = None) -> dict[int, float]:
    """Rows of `logits` [R, V] (32 bits or more) whose two best lie at most one rounding unit of `dtype` apart, with
    their gaps.

    `best` [R] is the argmax of each row where it is known.

    Such a row's argmax may change with the number of rows computed at once, because sums are then rounded in another
    order. `dtype` is what the model computed in; in float32 and float64 no row counts.
    """
    two = best_two(logits, dtype, best)
    if two is None:
        return {}
    peaks, seconds = to_host(*two)
    return near_ties_of(peaks, seconds, dtype)


def best_two(logits: Tensor, dtype: torch.dtype, best: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The largest and the second largest of each row, both [R], for `near_ties_of`; None where no row can count.

    The best of each row is hidden for a moment: that costs less than a copy, and both less than sorting two numbers out
    of each row.
    """
    if dtype not in (torch.bfloat16, torch.float16) or logits.shape[-1] < 2 or not logits.shape[0]:
        return None
    place = (first_max(logits) if best is None else best).unsqueeze(-1)  # [R, 1]
    peaks = logits.gather(-1, place)  # [R, 1]
    seconds = logits.scatter_(-1, place, -torch.inf).amax(-1)  # [R]
    logits.scatter_(-1, place, peaks)
    return peaks.squeeze(-1), seconds


def near_ties_of(peaks: Sequence[float], seconds: Sequence[float], dtype: torch.dtype) -> dict[int, float]:
    """`near_ties` from host copies of `best_two`."""
    unit, pairs = torch.finfo(dtype).eps, zip(peaks, seconds, strict=True)
    return {row: peak - second for row, (peak, second) in enumerate(pairs) if peak - second <= unit * abs(peak)}


def coldest(temperature: float) -> float:
    """The temperature that logits are divided by: below 1e-20 nothing changes but that float32 may overflow."""
    return max(temperature, _COLDEST)


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row: probabilities [B, V] (need not be normalised), uniforms [B] -> ids [B]."""
    return draw(probs, u)


def _choices(scores: Tensor, params: Sequence[SamplingParams], best: Tensor | None) -> list[Choice]:
    """How the compiled kernel samples each row."""
    made: dict[int, Choice] = {}
    places = [0] * len(params)
    if any(choice.greedy for choice in params):
        places = (first_max(scores) if best is None else best).tolist()
    choices = list[Choice]()
    for choice, place in zip(params, places, strict=True):
        if choice.greedy:
            choices.append(Choice(best=place))
            continue
        if id(choice) not in made:
            dropped = 1 - choice.top_p if choice.top_p < 1 else -1.0
            made[id(choice)] = Choice(0, choice.top_k, coldest(choice.temperature), dropped, choice.min_p)
        choices.append(made[id(choice)])
    return choices


def _distributions(
    scores: Tensor, best: Tensor | None, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """One distribution per row for rows that share their parameters: [R, V] -> [R, V]; `best` [R] where it is known."""
    if temperature == 0.0:
        return torch.zeros_like(scores).scatter_(-1, (first_max(scores) if best is None else best).unsqueeze(-1), 1)
    scores = scores / coldest(temperature)
    if top_k > 0:
        kth = torch.topk(scores, min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p < 1.0:
        scores = _filter_top_p(scores, top_p)
    if min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


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
