"""Attention of a ragged batch over a block-table cache.

Every sequence reads its own past and its own new rows, through one call per sequence and layer: no padding, so the
cost follows the real tokens. Draft tokens may form a tree; a row sees the past, the pending rows before it, and its
ancestors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.blocks import is_run
from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.interface import Segment
from foretoken.model.row_kernels import RowKernels, Scoring, SegmentRows, kernels_for
from foretoken.transfer import to_device


@dataclass(frozen=True)
class KeySlots:
    """Where the keys of a sequence's first `num_tokens` tokens are: in `blocks`, in their order."""

    blocks: tuple[int, ...]
    block_size: int
    num_tokens: int
    device: torch.device

    def __len__(self) -> int:
        return self.num_tokens

    @functools.cached_property
    def index(self) -> range | Tensor:
        """Their slots: a range when the blocks are neighbours, else gathered block by block."""
        if is_run(self.blocks):
            first = self.blocks[0] * self.block_size
            return range(first, first + self.num_tokens)
        return _slots_in(self.blocks, self.block_size, self.device)[: self.num_tokens]


@functools.lru_cache(maxsize=64)  # a sequence's blocks change once in `block_size` tokens
def _slots_in(blocks: tuple[int, ...], block_size: int, device: torch.device) -> Tensor:
    """The slots of some blocks, in their order: `[len(blocks) * block_size]`."""
    return (to_device(blocks, device).unsqueeze(1) * block_size + torch.arange(block_size, device=device)).flatten()


@dataclass
class Reader:
    """What one segment's rows read: `slots` of past and new rows, and which of them each row may see."""

    rows: slice
    slots: KeySlots
    past: int  # committed tokens before this forward
    segment: Segment
    sees_all: bool = False  # every row all of the new rows, also those behind it
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window


@dataclass(frozen=True)
class _Plan:
    """Who reads what a layer holds: the compiled kernel all `segments` in one call, torch each of `others`."""

    kernels: RowKernels | None
    segments: Sequence[SegmentRows]
    held: Sequence[Tensor]  # that the segments point to
    others: Sequence[Reader]


class PagedAttention:
    """Writes this forward's keys and values into the pool, then reads per segment; on a CPU, segments of few rows are
    read by `row_kernels`.
    """

    # Of a segment that the kernel reads; a prompt's many go through torch, whose products may use other units (AMX).
    max_kernel_rows: ClassVar[int] = 32

    def __init__(self, config: ModelConfig, pool: KVPool, write_slots: Tensor, readers: Sequence[Reader]) -> None:
        self.config, self.pool, self.write_slots, self.readers = config, pool, write_slots, readers
        self._kept_plan: _Plan | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        window = self.config.window(layer)
        plan = self._plan(query)
        if plan.kernels is None:
            self.pool.write(layer, self.write_slots, key, value)
            if len(self.readers) == 1:
                return self._read(layer, window, self.readers[0], query, sinks)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if plan.kernels is not None:
            cache = self.pool.keys[layer], self.pool.values[layer]
            scoring = Scoring(self.config.score_scale, self.config.attention_softcap, window, sinks)
            plan.kernels.attend(cache, self.write_slots, (query, key, value), plan.segments, scoring, out)
        for reader in plan.others:
            out[reader.rows] = self._read(layer, window, reader, query[reader.rows], sinks)
        return out

    def kernel_segments(self, like: Tensor) -> Sequence[SegmentRows] | None:
        """What the compiled kernel reads of every layer, if it reads all segments of all; `like`: as the queries."""
        plan = self._plan(like)
        return None if plan.others else plan.segments

    def _plan(self, like: Tensor) -> _Plan:
        if self._kept_plan is None:
            self._kept_plan = _plan(self.readers, self.max_kernel_rows, kernels_for(like))
        return self._kept_plan

    def _read(self, layer: int, window: int | None, reader: Reader, query: Tensor, sinks: Tensor | None) -> Tensor:
        """`query` [n, H, K] over the segment's slots. Query heads of one group become rows: no key is copied."""
        num_rows, heads, head_dim = query.shape
        groups = self.config.num_kv_heads
        keys, values = (one.to(query.dtype) for one in self.pool.read(layer, reader.slots.index))  # [G, C, K]
        rows = query.view(num_rows, groups, heads // groups, head_dim)
        if num_rows > 1:
            rows = rows.permute(1, 2, 0, 3).reshape(1, groups, -1, head_dim)
        mask = self._mask(reader, window, query)
        column = sink_column(sinks, groups, num_rows)
        # [1, G, H/G * n, K]
        read = read_values(rows, keys.unsqueeze(0), values.unsqueeze(0), mask, self.config, column)
        if num_rows > 1:
            read = read.view(groups, heads // groups, num_rows, head_dim).permute(2, 0, 1, 3)
        return read.reshape(num_rows, heads, head_dim)

    def _mask(self, reader: Reader, window: int | None, query: Tensor) -> Tensor | None:
        """Additive mask `[1, 1, H/G * n, C]`, made once per window and forward; None when every row sees everything."""
        if reader.sees_all:
            return None
        if window is not None and window >= len(reader.slots):
            window = None
        if window not in reader.masks:
            per_group = self.config.num_heads // self.config.num_kv_heads
            reader.masks[window] = additive_mask(reader.segment, reader.past, window, per_group, query)
        return reader.masks[window]


class KernelAttention(PagedAttention):
    """All segments are read by the kernel, so that a row's bits do not depend on how its text was cut into passes."""

    max_kernel_rows = sys.maxsize


def _plan(readers: Sequence[Reader], max_kernel_rows: int, kernels: RowKernels | None) -> _Plan:
    """The kernel reads segments of at most `max_kernel_rows` rows."""
    segments, held, others = list[SegmentRows](), list[Tensor](), list[Reader]()
    for reader in readers:
        if kernels is None or reader.segment.num_rows > max_kernel_rows:
            others.append(reader)
            continue
        segment, columns = SegmentRows(), reader.slots.index
        if isinstance(columns, range):
            segment.first_slot = columns.start
        else:
            held.append(columns)
            segment.slots = columns.data_ptr()
        if reader.sees_all or not reader.segment.is_chain:
            new = visible_new(reader.segment)[0]
            new = torch.ones_like(new) if reader.sees_all else new
            visible = new[reader.segment.num_held :].to(torch.uint8).contiguous()
            held.append(visible)
            segment.visible = visible.data_ptr()
        segment.num_columns, segment.num_rows = len(reader.slots), reader.segment.num_rows
        segment.shared, segment.first_row = reader.past, reader.rows.start
        segments.append(segment)
    return _Plan(kernels if segments else None, segments, held, others)


def additive_mask(segment: Segment, past: int, window: int | None, per_group: int, like: Tensor) -> Tensor | None:
    """What is added to a segment's scores, `[1, 1, per_group * num_rows, C]` like `like`; None: all rows see all."""
    num_rows = segment.num_rows
    if window is None and segment.is_chain:
        if num_rows == 1:
            return None
        mask = torch.zeros(per_group, num_rows, past + segment.num_held + num_rows, dtype=like.dtype)
        mask[:, :, -num_rows:] = torch.full((num_rows, num_rows), float("-inf"), dtype=like.dtype).triu_(1)
        return to_device(mask.view(1, 1, per_group * num_rows, -1), like.device, None)
    visible = visible_slots(segment, past, window)
    if bool(visible.all()):
        return None
    additive = torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, float("-inf"))
    return to_device(additive, like.device, None).repeat(per_group, 1)[None, None]


def visible_slots(segment: Segment, past: int, window: int | None) -> Tensor:
    """Which of past, held and new rows each new row sees: `[num_rows, past + num_held + num_rows]`, on the CPU."""
    new, depth = visible_new(segment)
    num_rows = len(depth)
    visible = torch.cat((torch.ones(num_rows, past, dtype=torch.bool), new), dim=1)
    if window is not None:
        at = torch.tensor([*range(past), *(past + d for d in depth)])  # position of each slot
        visible &= at[past:, None] - at[None, :] < window
    return visible[segment.num_held :]


def visible_new(segment: Segment) -> tuple[Tensor, list[int]]:
    """Which of the held nodes and new rows each of them may see, bool `[num_held + num_rows, same]` on the CPU, and the
    position of each behind the past.
    """
    num_rows, pending = segment.num_held + segment.num_rows, segment.num_pending
    new = torch.ones(num_rows, num_rows, dtype=torch.bool).tril_()
    depth = list(range(pending))
    if segment.is_chain:
        depth.extend(range(pending, num_rows))
    else:
        for node, parent in enumerate(segment.parents):
            row = pending + node
            above = pending - 1 if parent < 0 else pending + parent
            new[row, pending:] = False
            if parent >= 0:
                new[row] |= new[above]
            new[row, row] = True
            depth.append(pending if parent < 0 else depth[above] + 1)
    return new, depth


def row_positions(segment: Segment, past: int) -> list[int]:
    """Position of each new row: prefix length, and for a tree node prefix plus depth."""
    pending = segment.num_pending
    if segment.is_chain:
        return list(range(past + segment.num_held, past + pending + len(segment.parents)))
    positions = list(range(past, past + pending))
    for parent in segment.parents:
        positions.append(past + pending if parent < 0 else positions[pending + parent] + 1)
    return positions[segment.num_held :]


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
        if query.device.type != "cpu" and self._is_plain(layer, sinks):
            return self._in_one_launch(query, key, value)
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

    def _is_plain(self, layer: int, sinks: Tensor | None) -> bool:
        """Whether a row sees all rows before it, and nothing else."""
        return sinks is None and not self.config.attention_softcap and self.config.window(layer) is None

    def _in_one_launch(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain attention where each launch costs the host more than a small model's numbers cost the device."""
        queries, keys, values = (
            part.view(self.batch_size, self.length, *part.shape[1:]).transpose(1, 2) for part in (query, key, value)
        )  # [B, H, S, K], [B, G, S, K]
        read = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.config.score_scale, enable_gqa=True
        )
        return read.transpose(1, 2).reshape(query.shape)

    def _visible(self, layer: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Mask `[stop - start, stop]`: causal, and within the layer's window if it has one."""
        distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)[None, :]
        window = self.config.window(layer)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)
