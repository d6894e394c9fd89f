"""Ragged batches over a scattered cache, read by the kernel and by its eager twin."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KeySlots, PagedAttention, Reader
from foretoken.model.interface import Segment

CPU = torch.device("cpu")
TREE = (-1, 0, 0, 1, 2, 1, 3)
# A chunk of a prompt, one token, a chain, trees behind short and long texts, nodes behind held ones: past and segment.
MIXED = (
    (0, Segment(0, 13, (), 0)),
    (150, Segment(1, 1)),
    (37, Segment(2, 2, (-1, 0, 1))),
    (140, Segment(3, 1, TREE)),
    (3, Segment(4, 2, TREE[:4])),
    (70, Segment(5, 0, TREE, 1, num_held=3)),
    (129, Segment(6, 0, (-1, 0, 1, 2), 1, num_held=2)),
)


def config_of(heads: int, groups: int, head_dim: int, window: int | None = None, **others: float) -> ModelConfig:
    return ModelConfig("llama", 8, 8, 8, 1, heads, groups, head_dim, 512, sliding_window=(window,), **others)


class Batch:
    """`segments` over blocks of `block_size` in a shuffled pool, whose other slots are NaN, with random numbers."""

    def __init__(
        self,
        segments: Sequence[tuple[int, Segment]],
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        self.config = config
        sizes = [past + segment.num_held + segment.num_rows for past, segment in segments]
        needed = [-(-size // block_size) for size in sizes]
        free = list(range(2 * sum(needed)))
        random.Random(seed).shuffle(free)
        self.readers: list[Reader] = []
        held, written, first = list[int](), list[int](), 0
        for (past, segment), size, num_blocks in zip(segments, sizes, needed, strict=True):
            blocks, free = tuple(free[:num_blocks]), free[num_blocks:]
            own = [blocks[i // block_size] * block_size + i % block_size for i in range(size)]
            held += own
            written += own[size - segment.num_rows :]
            rows = slice(first, first + segment.num_rows)
            self.readers.append(Reader(rows, KeySlots(blocks, block_size, size, CPU), past, segment))
            first += segment.num_rows
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        groups, head_dim = config.num_kv_heads, config.head_dim
        self.pool = KVPool(1, groups, 2 * sum(needed) * block_size, head_dim, dtype, CPU)
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.fill_(float("nan"))
            tensor[:, held] = noise(groups, len(held), head_dim)
        self.write_slots = torch.tensor(written)
        packed = noise(first, config.num_heads + 2 * groups, head_dim)  # as one matrix gives them: rows with gaps
        self.parts = packed.split_with_sizes([config.num_heads, groups, groups], dim=1)
        self.sinks = noise(config.num_heads)

    def expected(self, sinks: Tensor | None = None) -> Tensor:
        """By torch's operations, one call per segment."""
        readers = [replace(reader, masks={}) for reader in self.readers]
        return PagedAttention(self.config, self.pool, self.write_slots, readers).attend(0, *self.parts, sinks)

    def fused(self, sinks: Tensor | None = None) -> Tensor:
        return FusedAttention(self.config, self.pool, self.write_slots, self.readers).attend(0, *self.parts, sinks)

    def alone(self, index: int, sinks: Tensor | None = None) -> Tensor:
        """What the kernel gives the rows of one segment without the others, after `fused` has written all."""
        reader = self.readers[index]
        rows = reader.rows
        only = replace(reader, rows=slice(0, rows.stop - rows.start))
        parts = [part[rows] for part in self.parts]
        return FusedAttention(self.config, self.pool, self.write_slots[rows], [only]).attend(0, *parts, sinks)

    def along(self, reader: Reader, path: Sequence[int]) -> Tensor:
        """What the kernel gives the last of these rows of a segment where they are all that stands behind its text."""
        size, stop = reader.slots.block_size, reader.past + len(path)
        pool = copy.copy(self.pool)
        pool.keys, pool.values = ([tensor.clone() for tensor in some] for some in (pool.keys, pool.values))
        blocks = reader.slots.blocks[: -(-stop // size)]
        slots = torch.tensor([blocks[at // size] * size + at % size for at in range(reader.past, stop)])
        chain = Segment(reader.segment.sequence, len(path))
        only = Reader(slice(0, len(path)), KeySlots(blocks, size, stop, CPU), reader.past, chain)
        parts = [part[reader.rows][list(path)] for part in self.parts]
        return FusedAttention(self.config, pool, slots, [only]).attend(0, *parts)[-1]
