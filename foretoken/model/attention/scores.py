"""Attention in torch's own operations: the twin of the compiled kernel, and what runs where there is none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.model.architecture import ModelConfig


def read_values(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, config: ModelConfig, sinks: Tensor | None = None
) -> Tensor:
    """`query` [n, G, R, K] over `keys` and `values` [n, G, C, K] -> [n, G, R, K].

    `mask` is added to the scores [n, G, R, C]; `sinks` [G, R, 1] stand beside them in the softmax.
    """
    if sinks is None and not config.attention_softcap:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=config.attention_scale)
    scores = capped(wide(query @ keys.transpose(-1, -2)) * config.score_scale, config.attention_softcap)
    weights = softmax_beside(scores if mask is None else scores + mask, sinks)
    return weights.to(values.dtype) @ values


def wide(scores: Tensor) -> Tensor:
    """`scores` in float32, or as they are in float64."""
    return scores if scores.dtype == torch.float64 else scores.float()


def capped(scores: Tensor, cap: float) -> Tensor:
    """`cap * tanh(scores / cap)` (Gemma 2); 0: no cap."""
    return cap * torch.tanh(scores / cap) if cap else scores


def softmax_beside(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of `scores` [..., R, C], of which `sinks` [..., R, 1] take a share (gpt-oss)."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]


def sink_column(sinks: Tensor | None, num_groups: int, num_positions: int) -> Tensor | None:
    """`sinks` [H] as [G, R, 1] beside the scores of a group's heads, the positions of each head together."""
    if sinks is None:
        return None
    return sinks.view(num_groups, -1, 1).expand(-1, -1, num_positions).reshape(num_groups, -1, 1)
