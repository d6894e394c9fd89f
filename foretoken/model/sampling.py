"""From logits to the target's law, and the only source of randomness.

Random numbers are counter-based: a pure function of (request seed, purpose, committed tokens when the round began, index
inside the round). What a request draws therefore never depends on its neighbours, and no two draws share a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import Draft, Uniforms
from foretoken.verify import draw

_SORT_WHOLE = 1024  # columns up to which sorting a whole row costs less than selecting what needs sorting
_COLDEST = 1e-20  # a lower temperature gives the same law, but dividing by it may overflow float32


def target_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The target's law at every row: logits [R, V] and the parameters of each row -> probabilities [R, V].

    Temperature 0 is a point at the argmax (lowest id on ties). Otherwise softmax after the filters in the order
    temperature, top_k, top_p, min_p, each as in transformers. float32 (float64 for float64 logits).
    """
    assert logits.shape[0] == len(params)
    scores = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, choice in enumerate(params):
        key = (0.0, 0, 1.0, 0.0) if choice.greedy else (choice.temperature, choice.top_k, choice.top_p, choice.min_p)
        groups.setdefault(key, []).append(row)
    if len(groups) == 1:
        return _law(scores, *next(iter(groups)))
    probs = torch.empty_like(scores)
    for key, members in groups.items():
        rows = torch.tensor(members, dtype=torch.int64, device=logits.device)
        probs[rows] = _law(scores[rows], *key)
    return probs


def check_finite(logits: Tensor) -> Tensor:
    """Whether each row can be sampled from: [R, V] -> bool [R], false for NaN, +inf, or nothing but -inf."""
    if logits.shape[0] == 0:
        return torch.ones(0, dtype=torch.bool, device=logits.device)
    return torch.isfinite(logits.amax(-1))  # amax hands NaN on; a lone -inf is a masked token


def near_ties(logits: Tensor) -> Tensor:
    """Rows `[R]` bool whose two best logits lie within one rounding unit of their own number format.

    Such a row's argmax may change with the number of rows computed at once, because sums are then rounded in another
    order. Only 16-bit formats are looked at; in float32 and float64 the answer is False.
    """
    if logits.dtype not in (torch.bfloat16, torch.float16):
        return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    best = logits.topk(2, dim=-1).values.float()  # [R, 2]
    return best[:, 0] - best[:, 1] <= torch.finfo(logits.dtype).eps * best[:, 0].abs()


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw one token per row: probabilities [B, V] (need not be normalised), uniforms [B] -> ids [B]."""
    return draw(probs, u)


def _law(scores: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """One law per row for rows that share their parameters: [R, V] -> [R, V]."""
    if temperature == 0.0:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
    scores = scores / max(temperature, _COLDEST)
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

    Of equally likely tokens at the border the lowest ids go, so that the law is a function of the row alone.
    """
    if scores.shape[-1] <= _SORT_WHOLE or scores.is_cuda:
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


class Purpose(IntEnum):
    """What a random number decides; each purpose has its own stream."""

    DRAFT = 0  # which token a drafter proposes
    ACCEPT = 1  # whether a proposed token stands
    NEXT = 2  # the token that ends the round


_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # [10, 2, 1]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 32-bit words, counter [4, n], key [2, n] -> [4, n]."""
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = even * _MULTIPLIERS  # 32 x 32 bits fit into 64
        even, odd = (product >> _HALF)[::-1] ^ odd ^ round_key, (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: Sequence[int], purpose: Purpose, round_starts: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one per (seed, round start, index): three sequences of n -> [n].

    `seeds` are 64-bit. `round_starts` are the committed tokens when the round began, so that a position drafted again
    in a later round gets fresh numbers. The value can never round to 1.
    """
    return _uniforms(seeds, [int(purpose)] * len(seeds), round_starts, indices)


def round_uniforms(draft: Draft, seeds: Sequence[int], round_starts: Sequence[int], device: torch.device | str = "cpu") -> Uniforms:
    """The numbers a rule needs in one round: `seeds` [B] and `round_starts` [B] -> one per node and one per request."""
    assert len(seeds) == len(round_starts) == draft.num_requests
    owner = [b for b, length in enumerate(draft.lengths) for _ in range(length)] + list(range(draft.num_requests))
    indices = [node for length in draft.lengths for node in range(length)] + [0] * draft.num_requests
    purposes = [int(Purpose.ACCEPT)] * draft.num_nodes + [int(Purpose.NEXT)] * draft.num_requests
    numbers = torch.from_numpy(_uniforms([seeds[b] for b in owner], purposes, [round_starts[b] for b in owner], indices)).to(device)
    return Uniforms(numbers[: draft.num_nodes], numbers[draft.num_nodes :])


def _uniforms(seeds: Sequence[int], purposes: Sequence[int], round_starts: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One number per column of (seed; index, round start, purpose): four sequences of n -> [n]."""
    wide = np.array(seeds, dtype=np.uint64)
    counter = np.array([indices, round_starts, purposes, [0] * len(seeds)], dtype=np.uint64)
    words = philox4x32(counter, np.stack((wide & _LOW, wide >> _HALF)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))  # 27 + 26 bits
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
