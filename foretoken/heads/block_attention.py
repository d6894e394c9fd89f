"""What the slots of a block attend to: the target's states before the anchor, as keys and values that each layer of the
drafter makes of them, and the slots of their own block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.heads.layers import HeadAttention, HeadLayer, HeadMLP, PlainAttention, layer_parts
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.interface import Segment
from foretoken.model.layer_pass import LayerParts
from foretoken.model.layers import RMSNorm
from foretoken.model.paged_cache import ForwardInputs, PagedCache
from foretoken.transfer import to_device


class BlockLayer(HeadLayer):
    """Pre-norm attention and gated MLP over the slots; context rows are read as they are, without the layer's norm."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = HeadAttention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = HeadMLP(shape)

    def forward(
        self, context: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], attention: PlainAttention, layer: int
    ) -> Tensor:
        """The residual stream of the slots `x` [T, D] behind this layer."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, attention, layer, context)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def parts(self) -> LayerParts:
        """See `HeadLayer`: the pass runs over slots."""
        return layer_parts(self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm)


class WindowAttention:
    """Training: A blocks of W slots in each of B windows of S context rows, no cache.

    `anchors` [B, A] are their anchors' positions; a slot sees the context rows before its anchor.
    """

    def __init__(self, shape: ModelConfig, anchors: Tensor, num_rows: int, num_slots: int, is_causal: bool) -> None:
        self.shape, self.num_slots = shape, num_slots
        self.num_windows, self.num_blocks = anchors.shape
        self.num_rows = num_rows
        ones = torch.ones(num_slots, num_slots, dtype=torch.bool, device=anchors.device)
        own = ones.tril() if is_causal else ones
        before = torch.arange(num_rows, device=anchors.device) < anchors[:, :, None, None]  # [B, A, 1, S]
        self._visible = torch.cat((before.expand(-1, -1, num_slots, -1), own.expand(*anchors.shape, -1, -1)), dim=-1)[
            :, None, None
        ]  # [B, 1, 1, A, W, S + W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        """See `PlainAttention`."""
        heads, groups, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        windows, blocks, slots, rows = self.num_windows, self.num_blocks, self.num_slots, self.num_rows
        past = windows * rows
        q = query.view(windows, blocks, slots, groups, heads // groups, head_dim).permute(0, 3, 4, 1, 2, 5)
        q = q * head_dim**-0.5  # [B, G, H/G, A, W, K]
        flat = q.reshape(windows, groups, -1, head_dim)  # [B, G, H/G * A * W, K]
        context_key, context_value = (
            one[:past].view(windows, rows, groups, head_dim).transpose(1, 2) for one in (key, value)
        )  # [B, G, S, K]
        own_key, own_value = (
            one[past:].view(windows, blocks, slots, groups, head_dim).permute(0, 3, 1, 2, 4)[:, :, None]
            for one in (key, value)
        )  # [B, G, 1, A, W, K]
        scores = torch.cat(
            ((flat @ context_key.transpose(2, 3)).view(*q.shape[:-1], rows), q @ own_key.transpose(-1, -2)), dim=-1
        )  # [B, G, H/G, A, W, S + W]
        scores = scores if scores.dtype == torch.float64 else scores.float()
        weights = scores.masked_fill(~self._visible, float("-inf")).softmax(-1).to(value.dtype)
        read = weights[..., rows:] @ own_value
        read = read + (weights[..., :rows].reshape(*flat.shape[:-1], rows) @ context_value).view(q.shape)
        return read.permute(0, 3, 4, 1, 2, 5).reshape(-1, heads, head_dim)


class BlockRows(NamedTuple):
    """Rows of a pass that a cache admitted: new context rows of some sequences, and a block of slots behind each."""

    context: ForwardInputs
    slots: ForwardInputs
    is_causal: bool

    def commit(self, cache: PagedCache) -> None:
        """After the pass: keep the context rows in the cache that admitted them; the next pass overwrites the slots."""
        for reader in self.context.readers:
            cache.commit(reader.segment.sequence, reader.segment.num_pending)


def admit_blocks(
    cache: PagedCache, sequences: Sequence[int], num_new: Sequence[int], num_slots: Sequence[int], is_causal: bool
) -> BlockRows:
    """Make room for `num_new` context rows of each sequence, and `num_slots` behind them.

    Raises:
        CapacityError: no room for them.
    """
    new = cache.admit([Segment(one, rows, (), 0) for one, rows in zip(sequences, num_new, strict=True) if rows])
    slots = cache.admit([Segment(one, rows) for one, rows in zip(sequences, num_slots, strict=True)], num_new)
    for reader in slots.readers:
        reader.sees_all = not is_causal
    return BlockRows(new, slots, is_causal)


class CachedAttention:
    """Inference: blocks behind the context of some sequences, as `cache` admitted them; keys and values are there."""

    def __init__(self, cache: PagedCache, rows: BlockRows) -> None:
        new, slots = rows.context, rows.slots
        self._cache, self._num_new = cache, len(new.positions)
        device = cache.device
        self.positions = to_device([*new.positions, *slots.positions], device)  # [C + T]
        self._new_slots, own = to_device(new.slots, device), to_device(slots.slots, device)
        kind = cache.attention
        if not rows.is_causal and not issubclass(kind, FusedAttention):
            kind = PagedAttention  # whose mask can be left out
        self._attention = kind(cache.local, cache.pool, own, slots.readers)
        # What a compiled pass over the slots attends with, once the context of its layers is kept.
        self.of_slots = self._attention if rows.is_causal else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PlainAttention`."""
        first = self._num_new
        self.keep_context(layer, key[:first], value[:first])
        return self._attention.attend(layer, query, key[first:], value[first:])

    def keep_context(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key and value [C, G, K] of the new context rows."""
        if self._num_new:
            self._cache.pool.write(layer, self._new_slots, key, value)
