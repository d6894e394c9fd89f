"""Log-probabilities to report: of the distribution a token was drawn from, or of the model's own softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import TokenLogprobs
from foretoken.text.sampling import target_probs


def sampling_log_probs(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities of the distribution that each row's token is drawn from: processed logits [n, V] -> [n, V].

    `params` are each row's parameters. Tokens that the filters remove get -inf. At temperature 0 it is the distribution
    of temperature 1 without filters. float32 (float64 for float64 logits).
    """
    greedy = [row for row, choice in enumerate(params) if choice.greedy]
    if len(greedy) == len(params):
        return log_model(logits)
    distribution = target_probs(logits, params).log()
    distribution[greedy] = log_model(logits[greedy])
    return distribution


def log_model(logits: Tensor) -> Tensor:
    """Log-softmax of `logits`, unprocessed: [n, V] -> [n, V], float32 (float64 for float64 logits)."""
    return torch.log_softmax(logits, -1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def token_logprobs(distribution: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenLogprobs]:
    """What to report of `tokens` [n], each drawn from its row of log-probabilities `distribution` [n, V], with the
    `top` likeliest of the row.

    Equal ones are ordered by id, in lists and ranks alike. Tokens of probability 0 are not listed, so a list may come
    out shorter.
    """
    assert distribution.shape[0] == len(tokens)
    if not tokens:
        return []
    chosen = torch.tensor(tokens, dtype=torch.int64, device=distribution.device)[:, None]  # [n, 1]
    values = distribution.gather(-1, chosen)  # [n, 1]
    before = (distribution > values) | (
        (distribution == values) & (torch.arange(distribution.shape[-1], device=distribution.device) < chosen)
    )  # [n, V]
    ranks = (1 + before.sum(-1)).tolist()
    tops = _likeliest(distribution, min(top, distribution.shape[-1])) if top > 0 else [()] * len(tokens)
    return [TokenLogprobs(*row) for row in zip(tokens, values[:, 0].tolist(), ranks, tops, strict=True)]


def _likeliest(distribution: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The `top` likeliest tokens of each row, equal ones by id, without those of probability 0."""
    least = distribution.topk(top, -1).values[:, -1:]  # [n, 1]; topk itself breaks ties as it likes
    listed = []
    for row, candidate in zip(distribution, (distribution >= least) & (distribution > -torch.inf), strict=True):
        ids = candidate.nonzero()[:, 0]  # rising, and a few more than `top` only if the last place is tied
        values, order = row[ids].sort(descending=True, stable=True)
        listed.append(tuple(zip(ids[order[:top]].tolist(), values[:top].tolist(), strict=True)))
    return listed
