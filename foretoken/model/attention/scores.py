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


# Queries are taken in chunks so that a chunk multiplies only the keys it may see. On a CPU this is twice as fast,
# forward and backward, as the fused kernel at head_dim 64 (LOG.md, 2026-11-21).
_QUERY_CHUNK = 128


class PackedAttention:
    """`batch_size` sequences of `length` tokens each, flat; no cache."""

    def __init__(self, config: ModelConfig, batch_size: int, length: int) -> None:
        self.config, self.batch_size, self.length = config, batch_size, length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        heads, groups, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        batch, length, per_group = self.batch_size, self.length, heads // groups
        q = query.reshape(batch, length, groups, per_group, head_dim).permute(0, 2, 3, 1, 4)
        q = q * self.config.score_scale
        k = key.reshape(batch, length, groups, head_dim).transpose(1, 2).reshape(batch * groups, length, head_dim)
        v = value.reshape(batch, length, groups, head_dim).transpose(1, 2).reshape(batch * groups, length, head_dim)
        beside = None if sinks is None else sinks.view(groups, per_group, 1, 1).repeat(batch, 1, 1, 1)
        read = []
        for start in range(0, length, _QUERY_CHUNK):
            stop = min(start + _QUERY_CHUNK, length)
            rows = q[:, :, :, start:stop].reshape(batch * groups, -1, head_dim)  # [B*G, H/G * chunk, K]
            scores = torch.bmm(rows, k[:, :stop].transpose(1, 2)).view(batch * groups, per_group, stop - start, stop)
            scores = capped(wide(scores), self.config.attention_softcap)
            scores = scores.masked_fill(~self._visible(layer, start, stop, query.device), float("-inf"))
            weights = softmax_beside(scores, beside).to(v.dtype).view(batch * groups, -1, stop)
            read.append(torch.bmm(weights, v[:, :stop]).view(batch, groups, per_group, stop - start, head_dim))
        return torch.cat(read, dim=3).permute(0, 3, 1, 2, 4).reshape(batch * length, heads, head_dim)

    def _visible(self, layer: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Mask `[stop - start, stop]`: causal, and within the layer's window if it has one."""
        distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)[None, :]
        window = self.config.window(layer)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)
