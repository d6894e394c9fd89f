"""Attention of a ragged batch by one kernel launch per layer, over the cache as it lies: nothing is gathered or padded.

`kernels.paged_triton` computes; here a batch becomes the numbers that it reads. `paged.PagedAttention` gives the same
result up to rounding and is what tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.paged_work import (
    ALIGNED,
    MERGE_FIELDS,
    SEGMENT_FIELDS,
    SPAN_COLUMNS,
    TILE_FIELDS,
    PagedWork,
    tile_lines,
)
from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import Reader, row_positions, visible_new
from foretoken.model.interface import Segment
from foretoken.transfer import to_device

# Long texts are shared among programs where a segment has few rows, which alone make few programs; as many rows and
# heads over all parts as take 128 MiB at a head_dim of 128. A row's bits do not depend on it.
_MAX_SHARED_ROWS = 64
_MAX_PART_LINES = 2**18
_NONE = torch.empty(0, dtype=torch.int32)


class FusedAttention:
    """Writes this forward's keys and values into the pool, then reads all segments at once."""

    def __init__(self, config: ModelConfig, pool: KVPool, write_slots: Tensor, readers: Sequence[Reader]) -> None:
        self.config, self.pool, self.write_slots = config, pool, write_slots
        self._block_size = readers[0].slots.block_size if readers else 1
        self._work = work_of(readers, config, write_slots.device)

    @classmethod
    def over(
        cls, config: ModelConfig, pool: KVPool, write_slots: Tensor, block_size: int, work: PagedWork
    ) -> FusedAttention:
        """Of a batch that lies on the device already."""
        attention = cls.__new__(cls)
        attention.config, attention.pool, attention.write_slots = config, pool, write_slots
        attention._block_size, attention._work = block_size, work
        return attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        self.pool.write(layer, self.write_slots, key, value)
        return self._read(layer, query, sinks)

    def _read(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """What each `query` [T, H, K] reads of the cache, [T, H, K]."""
        from foretoken.kernels.paged_triton import attend  # needs triton

        cache = self.pool.keys[layer], self.pool.values[layer]
        config, window = self.config, self.config.window(layer)
        return attend(
            self._work, cache, self._block_size, query, config.score_scale, config.attention_softcap, window, sinks
        )


@dataclass
class WorkNumbers:
    """The parts of `PagedWork` on the host, as they grow segment by segment."""

    segments: list[int] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    distances: list[Tensor] = field(default_factory=list)
    num_distances: int = 0
    num_parts: int = 1
    num_part_rows: int = 0

    @property
    def num_tiles(self) -> int:
        """Tiles of all segments."""
        return len(self.tiles) // TILE_FIELDS

    def add(self, reader: Reader, num_heads: int, rows_per_tile: int) -> None:
        """The rows of one segment."""
        segment, num_columns = reader.segment, len(reader.slots)
        num_rows, num_spans = segment.num_rows, -(-num_columns // SPAN_COLUMNS)
        is_shared = (
            num_rows <= _MAX_SHARED_ROWS
            and num_spans > 1
            and self.num_part_rows + num_rows * num_spans <= max_part_rows(num_heads)
        )
        index, first_distance = len(self.segments) // SEGMENT_FIELDS, -1
        if reader.sees_all or not segment.is_chain:
            first_distance = self.num_distances
            told = distances(segment).flatten()
            self.distances.append(torch.zeros_like(told) if reader.sees_all else told)
            self.num_distances += len(self.distances[-1])
        self.segments += (reader.past, num_columns, num_rows, reader.rows.start)
        self.segments += (len(self.blocks), first_distance, 1 if is_shared else num_spans, self.num_part_rows)
        for first in range(0, num_rows, rows_per_tile):
            self.tiles += (index, first)
        self.blocks += reader.slots.blocks
        self.positions += row_positions(segment, reader.past)
        if is_shared:
            for row in range(num_rows):
                self.merged += (reader.rows.start + row, self.num_part_rows + row, num_rows, num_spans)
            self.num_parts = max(self.num_parts, num_spans)
            self.num_part_rows += num_rows * num_spans


def numbers_of(readers: Sequence[Reader], config: ModelConfig) -> WorkNumbers:
    """The batch as the kernel reads it, on the host."""
    numbers, heads_per_group = WorkNumbers(), config.num_heads // config.num_kv_heads
    rows_per_tile = tile_lines(heads_per_group, config.head_dim) // heads_per_group
    for reader in readers:
        if reader.segment.num_rows:
            numbers.add(reader, config.num_heads, rows_per_tile)
    return numbers


def max_part_rows(num_heads: int) -> int:
    """Most rows over all parts of a batch."""
    return _MAX_PART_LINES // num_heads


def work_of(readers: Sequence[Reader], config: ModelConfig, device: torch.device) -> PagedWork:
    """The batch as the kernel reads it, in one copy to the device."""
    numbers = numbers_of(readers, config)
    lists = (numbers.segments, numbers.tiles, numbers.merged, numbers.blocks, numbers.positions)
    parts = [*(torch.tensor(one, dtype=torch.int32) for one in lists), torch.cat([_NONE, *numbers.distances])]
    padded = [F.pad(part, (0, -len(part) % ALIGNED)) for part in parts]
    segments, tiles, merged, blocks, positions, told = to_device(torch.cat(padded), device, None).split_with_sizes(
        [len(part) for part in padded]
    )
    return PagedWork(
        *(segments, tiles, merged, blocks, positions, told),
        num_tiles=numbers.num_tiles,
        num_parts=numbers.num_parts,
        num_merged=len(numbers.merged) // MERGE_FIELDS,
        num_part_rows=numbers.num_part_rows,
        has_trees=bool(numbers.distances),
    )


def distances(segment: Segment) -> Tensor:
    """How many positions each new row is behind each held node and new row, -1 where it does not see it: int32
    `[num_rows, num_held + num_rows]` on the CPU.
    """
    visible, depth = visible_new(segment)
    at = torch.tensor(depth, dtype=torch.int32)
    return (at[:, None] - at[None, :]).masked_fill_(~visible, -1)[segment.num_held :]
