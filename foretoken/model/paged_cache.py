"""The K/V of a stack of layers for many sequences, in blocks: what a paged model and a trained head keep.

Rows of a forward are admitted first (`admit`: positions, slots, what each row may see), then written and read by the
attention that `attention` makes for them, then committed or forgotten.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from foretoken.errors import CapacityError, InputError
from foretoken.kv.blocks import BlockAllocator, BlockTable, slots_of
from foretoken.kv.pool import KVPool, bytes_per_token
from foretoken.kv.prefix import PrefixStats, StatesOf
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.choice import AttentionKind, chosen
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KeySlots, Reader, row_positions
from foretoken.model.interface import LanguageModel, Segment

DEFAULT_BLOCK_SIZE = 32


@dataclass(frozen=True)
class ForwardInputs:
    """The rows of one forward: position and slot of each, who wants logits and taps, and what each segment reads."""

    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows whose logits are returned
    tapped: list[int] = field(default_factory=list)  # rows whose hidden states are returned
    readers: list[Reader] = field(default_factory=list)


class PagedCache:
    """Block tables over one pool; `num_slots` tokens are shared by all sequences.

    `shape` is that of the layers whose keys and values are kept, on this rank; `exact_rows`: see `attention.choice`.
    """

    def __init__(
        self,
        shape: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        block_size: int = DEFAULT_BLOCK_SIZE,
        exact_rows: bool = False,
    ) -> None:
        if num_slots < block_size:
            raise InputError("num_slots", num_slots, f"must be at least the block size, {block_size}")
        self.local, self.block_size, self.dtype, self.device = shape, block_size, dtype, device
        self.kv_bytes_per_token = bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
        self.allocator = BlockAllocator(num_slots // block_size, block_size)
        self.capacity_tokens = self.allocator.num_blocks * block_size
        self.attention: AttentionKind = chosen(device, dtype, exact_rows)
        # Padding of captured steps is written behind the blocks of all sequences.
        num_spare = block_size if issubclass(self.attention, FusedAttention) else 0
        self.pool = KVPool(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            num_slots=self.capacity_tokens + num_spare,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )
        self.tables: dict[int, BlockTable] = {}

    def twin_cache(self) -> Self:
        """Other sequences over the same memory: only while nothing is held here, not to be used once something is."""
        assert not self.tables, "a sequence is open"
        assert not self.allocator.num_kept, "a text is kept"
        twin = copy.copy(self)
        twin.allocator, twin.tables = BlockAllocator(self.allocator.num_blocks, self.block_size), {}
        return twin

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""
        assert sequence not in self.tables, f"sequence {sequence} is open already"
        self.tables[sequence] = BlockTable()

    def fork(self, sequence: int, child: int) -> None:
        """Open `child` with the committed past of `sequence`, sharing its blocks until one of them is written."""
        assert child not in self.tables, f"sequence {child} is open already"
        self.tables[child] = self.allocator.fork(self.tables[sequence])

    def adopt(self, sequence: int, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`: whole blocks are shared, without a copy."""
        return self.allocator.adopt(self.tables[sequence], tenant, tokens, max_tokens)

    def shared_tokens(self, tokens: Sequence[int], tenant: str, max_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`."""
        return self.allocator.num_shared_tokens(tenant, tokens, max_tokens)

    def publish(self, sequence: int, tokens: Sequence[int], tenant: str) -> None:
        """See `interface.PrefixModel`."""
        self.allocator.publish(self.tables[sequence], tenant, tokens)

    def attach(
        self, sequence: int, tokens: Sequence[int], tenant: str, num_blocks: int, owner: Hashable, states_of: StatesOf
    ) -> None:
        """See `interface.PrefixModel`."""
        self.allocator.attach(self.tables[sequence], tenant, tokens, num_blocks, owner, states_of)

    def attached(self, tokens: Sequence[int], tenant: str, owner: Hashable) -> list[object]:
        """See `interface.PrefixModel`."""
        return self.allocator.attached(tenant, tokens, owner)

    def drop_prefixes(self) -> None:
        """See `interface.PrefixModel`."""
        self.allocator.drop_prefixes()

    @property
    def prefix_stats(self) -> PrefixStats:
        """How often a sequence could begin with blocks of another one."""
        return self.allocator.prefix_stats

    def close(self, sequence: int) -> None:
        """Forget a sequence and give back its blocks."""
        self.allocator.free(self.tables.pop(sequence))

    def length(self, sequence: int) -> int:
        """Number of committed tokens held for `sequence`."""
        return self.tables[sequence].length

    def num_free_tokens(self) -> int:
        """Tokens that fit into the free blocks."""
        return self.allocator.num_free * self.block_size

    def footprint_tokens(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole blocks."""
        return -(-num_tokens // self.block_size) * self.block_size

    def reserve(self, sequence: int, num_rows: int) -> bool:
        """Make room for `num_rows` more rows; False, with nothing changed, if there is none."""
        copies = self.allocator.reserve(self.tables[sequence], num_rows)
        if not copies:
            return copies is not None
        size = self.block_size
        sources = [source * size + i for source, _ in copies for i in range(size)]
        self.move(sources, [destination * size + i for _, destination in copies for i in range(size)])
        return True

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots in every layer, see `KVPool.move`."""
        self.pool.move(sources, destinations)

    def room_behind(self, sequence: int, num_rows: int) -> KeySlots:
        """Where the tokens of a sequence are, with room for `num_rows` more behind what is committed.

        Raises:
            CapacityError: no room for them.
        """
        if not self.reserve(sequence, num_rows):
            raise self._no_room(num_rows)
        table = self.tables[sequence]
        stop = table.length + num_rows
        return KeySlots(tuple(table.blocks[: -(-stop // self.block_size)]), self.block_size, stop, self.device)

    def _no_room(self, num_rows: int) -> CapacityError:
        return CapacityError(f"out of KV blocks: {num_rows} rows wanted, {self.num_free_tokens()} tokens free")

    def admit(self, segments: Sequence[Segment], offsets: Sequence[int] | None = None) -> ForwardInputs:
        """Make room for the rows of all segments, each `offsets` rows behind what is committed.

        Raises:
            CapacityError: no room for them.
        """
        inputs = ForwardInputs()
        for segment, offset in zip(segments, offsets or [0] * len(segments), strict=True):
            table, first = self.tables[segment.sequence], len(inputs.positions)
            before = offset + segment.num_held  # rows of earlier forwards that stay
            if not self.reserve(segment.sequence, before + segment.num_rows):
                raise self._no_room(segment.num_rows)
            past = table.length + offset
            start, stop = past + segment.num_held, past + segment.num_held + segment.num_rows
            inputs.positions.extend(row_positions(segment, past))
            inputs.slots.extend(slots_of(table, start, stop, self.block_size))
            last = len(inputs.positions)
            blocks = tuple(table.blocks[: -(-stop // self.block_size)])
            slots = KeySlots(blocks, self.block_size, stop, self.device)
            inputs.readers.append(Reader(slice(first, last), slots, past, segment))
            inputs.wanted.extend(range(last - segment.num_logits, last))
            inputs.tapped.extend(range(last - segment.num_taps, last))
        return inputs

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """Keep the pending rows and the nodes of `path`; a scattered path is moved to consecutive slots."""
        table = self.tables[sequence]
        base = table.length + num_pending
        scattered = [(node, place) for place, node in enumerate(path) if node != place]
        if scattered:
            slots = slots_of(table, base, base + max(path) + 1, self.block_size)
            self.move([slots[node] for node, _ in scattered], [slots[place] for _, place in scattered])
        table.length = base + len(path)
        assert table.length <= len(table.blocks) * self.block_size

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self.allocator.rollback(self.tables[sequence], length)

    def check(self) -> None:
        """Assert that every block is free or held by an open sequence, and nothing is kept of others."""
        self.allocator.check(list(self.tables.values()))


def cache_beside(target: LanguageModel, shape: ModelConfig, dtype: torch.dtype) -> PagedCache:
    """A cache for layers of `shape` that work beside `target`: as many tokens as the target holds, in blocks as large
    as its own, or the usual ones beside a target that rounds nothing.
    """
    block_size = target.footprint_tokens(1)
    if block_size == 1:
        block_size = min(DEFAULT_BLOCK_SIZE, target.capacity_tokens)
    return PagedCache(shape, dtype, target.device, target.capacity_tokens, block_size)
