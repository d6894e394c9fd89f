"""Log-probabilities to report: of the law a token was drawn from, or of the model's own softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import TokenLogprobs
from foretoken.model.sampling import target_probs


def log_law(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities of the law that each row's token is drawn from: processed logits [n, V], parameters of each row
    -> [n, V].

    -inf for what the filters took away. At temperature 0 the law before the argmax, at temperature 1 and without
    filters. float32 (float64 for float64 logits).
    """
    greedy = [row for row, choice in enumerate(params) if choice.greedy]
    if len(greedy) == len(params):
        return log_model(logits)
    law = target_probs(logits, params).log()
    law[greedy] = log_model(logits[greedy])
    return law


def log_model(logits: Tensor) -> Tensor:
    """Log-probabilities of the softmax of `logits`, as they are: [n, V] -> [n, V], float32 (float64 for float64
    logits).
    """
    return torch.log_softmax(logits, -1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)


def token_logprobs(law: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenLogprobs]:
    """What to report of `tokens` [n], each drawn from its row of log-probabilities `law` [n, V], with the `top`
    likeliest of the row.

    Equal ones are ordered by id, in lists and ranks alike. Tokens of probability 0 are not listed, so a list may come
    out shorter.
    """
    assert law.shape[0] == len(tokens)
    if not tokens:
        return []
    chosen = torch.tensor(tokens, dtype=torch.int64, device=law.device)[:, None]  # [n, 1]
    values = law.gather(-1, chosen)  # [n, 1]
    before = (law > values) | ((law == values) & (torch.arange(law.shape[-1], device=law.device) < chosen))  # [n, V]
    ranks = (1 + before.sum(-1)).tolist()
    tops = _likeliest(law, min(top, law.shape[-1])) if top > 0 else [()] * len(tokens)
    return [TokenLogprobs(*row) for row in zip(tokens, values[:, 0].tolist(), ranks, tops, strict=True)]


def _likeliest(law: Tensor, top: int) -> list[tuple[tuple[int, float], ...]]:
    """The `top` likeliest tokens of each row, equal ones by id, without those of probability 0."""
    least = law.topk(top, -1).values[:, -1:]  # [n, 1]; topk itself breaks ties as it likes
    listed = []
    for row, candidate in zip(law, (law >= least) & (law > -torch.inf), strict=True):
        ids = candidate.nonzero()[:, 0]  # rising, and a few more than `top` only if the last place is tied
        values, order = row[ids].sort(descending=True, stable=True)
        listed.append(tuple(zip(ids[order[:top]].tolist(), values[:top].tolist(), strict=True)))
    return listed
