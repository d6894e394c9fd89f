"""Our decoder with a block-table cache: the `LanguageModel` of the engine and of draft models."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from foretoken.errors import CapacityError, InputError
from foretoken.kv.blocks import BlockAllocator, BlockTable, slots_of
from foretoken.kv.pool import KVPool, bytes_per_token
from foretoken.kv.prefix import PrefixStats
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.paged import KeySlots, PagedAttention, Reader, row_positions
from foretoken.model.decoder import Decoder, Hidden
from foretoken.model.early import EarlyRows, Join, first_missing, joins_of, waiting_rows, without
from foretoken.model.interface import EarlySegment, ForwardOutput, Segment
from foretoken.transfer import to_device

DEFAULT_BLOCK_SIZE = 32


@dataclass(frozen=True)
class ForwardInputs:
    """The rows of one forward: position and slot of each, who wants logits and taps, and what each segment reads."""

    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)  # rows whose logits are returned
    tapped: list[int] = field(default_factory=list)  # rows whose hidden states are returned
    readers: list[Reader] = field(default_factory=list)


class PagedModel:
    """See `interface.EarlyExitModel`; `num_slots` tokens of cache are shared by all sequences."""

    def __init__(self, decoder: Decoder, num_slots: int, block_size: int = DEFAULT_BLOCK_SIZE) -> None:
        if num_slots < block_size:
            raise InputError("num_slots", num_slots, f"must be at least the block size, {block_size}")
        self.decoder, self.config, self.local, self.block_size = decoder, decoder.config, decoder.local, block_size
        weight = decoder.norm.weight
        self.dtype, self._device = weight.dtype, weight.device
        self.allocator = BlockAllocator(num_slots // block_size, block_size)
        self.pool = KVPool(
            num_layers=self.local.num_layers,
            num_kv_heads=self.local.num_kv_heads,
            num_slots=self.allocator.num_blocks * block_size,
            head_dim=self.local.head_dim,
            dtype=self.dtype,
            device=self._device,
        )
        # Calls are cheap on a CPU, where padding would cost; on a GPU it is the other way round.
        self.attention: type[PagedAttention | BatchedAttention] = (
            PagedAttention if self._device.type == "cpu" else BatchedAttention
        )
        self.tables: dict[int, BlockTable] = {}
        self._early: dict[int, EarlyRows] = {}

    @property
    def vocab_size(self) -> int:
        """Number of columns of the logits."""
        return self.config.vocab_size

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence the model was made for."""
        return self.config.max_context_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.config.eos_token_ids

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        return self.config.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self.decoder.weight_bytes

    @property
    def step_bytes(self) -> int:
        """Weights that a step of one token reads."""
        return self.decoder.step_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache memory of one token over all layers, on this rank."""
        local = self.local
        return bytes_per_token(local.num_layers, local.num_kv_heads, local.head_dim, self.dtype)

    @property
    def numerics(self) -> str:
        """See `interface.LanguageModel`."""
        return "default"

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._device

    def open(self, sequence: int) -> None:
        """Begin an empty sequence."""
        assert sequence not in self.tables, f"sequence {sequence} is open already"
        self.tables[sequence] = BlockTable()

    def fork(self, sequence: int, child: int) -> None:
        """Open `child` with the committed past of `sequence`, sharing its blocks until one of them is written."""
        assert child not in self.tables, f"sequence {child} is open already"
        self.tables[child] = self.allocator.fork(self.tables[sequence])

    def twin(self) -> PagedModel:
        """See `interface.TwinModel`."""
        assert not self.tables, "a sequence is open"
        assert not self.allocator.num_kept, "a text is kept"
        twin = copy.copy(self)
        twin.allocator, twin.tables, twin._early = BlockAllocator(self.allocator.num_blocks, self.block_size), {}, {}
        return twin

    def fresh(self) -> PagedModel:
        """See `interface.OpenModel`."""
        return type(self)(self.decoder, self.capacity_tokens, self.block_size)

    def adopt(self, sequence: int, tokens: Sequence[int], tenant: str, most_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`: whole blocks are shared, without a copy."""
        return self.allocator.adopt(self.tables[sequence], tenant, tokens, most_tokens)

    def shared_tokens(self, tokens: Sequence[int], tenant: str, most_tokens: int | None = None) -> int:
        """See `interface.PrefixModel`."""
        return self.allocator.num_shared_tokens(tenant, tokens, most_tokens)

    def publish(self, sequence: int, tokens: Sequence[int], tenant: str) -> None:
        """See `interface.PrefixModel`."""
        self.allocator.publish(self.tables[sequence], tenant, tokens)

    def attach(self, tokens: Sequence[int], tenant: str, owner: Hashable, first: int, states: Sequence[object]) -> None:
        """See `interface.PrefixModel`."""
        self.allocator.attach(tenant, tokens, owner, first, states)

    def attached(self, tokens: Sequence[int], tenant: str, owner: Hashable) -> list[object]:
        """See `interface.PrefixModel`."""
        return self.allocator.attached(tenant, tokens, owner)

    @property
    def prefix_stats(self) -> PrefixStats:
        """How often a sequence could begin with blocks of another one."""
        return self.allocator.prefix_stats

    def close(self, sequence: int) -> None:
        """Forget a sequence and give back its blocks."""
        self._early.pop(sequence, None)
        self.allocator.free(self.tables.pop(sequence))

    def length(self, sequence: int) -> int:
        """Number of committed tokens held for `sequence`."""
        return self.tables[sequence].length

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all blocks together hold."""
        return self.allocator.num_blocks * self.block_size

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
        self.pool.move(sources, [destination * size + i for _, destination in copies for i in range(size)])
        return True

    @torch.inference_mode()
    def forward(self, tokens: Tensor, segments: Sequence[Segment], taps: Sequence[int] = ()) -> ForwardOutput:
        """Run the flat `tokens` [T]; logits and taps of the rows each segment asks for."""
        inputs = self._admit(segments)
        taps = taps if inputs.tapped else ()
        early = [self._early.pop(segment.sequence, None) for segment in segments]
        hidden = self._through(tokens, inputs, joins_of(tokens, inputs.readers, early, taps), taps)
        logits = self.decoder.logits(hidden.last[self._rows(inputs, inputs.wanted)])
        if not taps:
            return ForwardOutput(logits, {})
        tapped = self._rows(inputs, inputs.tapped)
        return ForwardOutput(logits, {layer: tap[tapped] for layer, tap in hidden.taps.items()})

    @torch.inference_mode()
    def forward_early(self, tokens: Tensor, segments: Sequence[EarlySegment], layers: Sequence[int]) -> Tensor:
        """See `interface.EarlyExitModel`."""
        depth = first_missing(layers)
        assert depth < self.num_layers
        inputs = self._admit(
            [Segment(early.sequence, early.num_rows, (), early.num_logits) for early in segments],
            [e.offset for e in segments],
        )
        positions, slots = to_device([inputs.positions, inputs.slots], self._device)
        attention = self.attention(self.local, self.pool, slots, inputs.readers)
        shared = self.decoder(
            tokens, positions, attention, num_layers=depth
        ).last  # [T, D]: what a full pass computes too
        for early, reader in zip(segments, inputs.readers, strict=True):
            before = self._early.get(early.sequence) if early.offset else None
            self._early[early.sequence] = EarlyRows.following(
                before, early.offset, depth, tokens[reader.rows], shared[reader.rows]
            )
        last = self.decoder.run(shared, positions, attention, layers[depth:]).last
        return self.decoder.logits(last[self._rows(inputs, inputs.wanted)])

    def exit_logits(self, hidden: Tensor) -> Tensor:
        """See `interface.EarlyExitModel`."""
        with torch.inference_mode():
            return self.decoder.logits(hidden)

    def head_cost(self) -> float:
        """See `interface.EarlyExitModel`."""
        return self.config.vocab_size * self.config.hidden_size / self.config.num_layer_parameters

    def _through(self, tokens: Tensor, inputs: ForwardInputs, joins: Sequence[Join], taps: Sequence[int]) -> Hidden:
        """All layers over all rows `tokens` [T]; rows that ran early begin where they stopped."""
        positions, slots = to_device([inputs.positions, inputs.slots], self._device)
        x = self.decoder.embed(tokens)  # [T, D]
        for join in joins:
            x[join.rows] = join.hidden
        depths = sorted({0, *(join.depth for join in joins)})
        for first, last in pairwise(depths):
            rows, readers = without(inputs.readers, waiting_rows(joins, first))
            if rows:
                active = to_device(rows, self._device)
                attention = self.attention(self.local, self.pool, slots[active], readers)
                x = x.index_copy(
                    0, active, self.decoder.run(x[active], positions[active], attention, range(first, last)).last
                )
        attention = self.attention(self.local, self.pool, slots, inputs.readers)
        return self.decoder.run(x, positions, attention, range(depths[-1], self.num_layers), taps)

    def _rows(self, inputs: ForwardInputs, rows: Sequence[int]) -> slice | Tensor:
        """An index of `rows`, which are some rows of the forward, in order."""
        if len(rows) == len(inputs.positions):
            return slice(None)
        return to_device(rows, self._device)

    def _admit(self, segments: Sequence[Segment], offsets: Sequence[int] | None = None) -> ForwardInputs:
        """Make room for the rows of all segments, each `offsets` rows behind what is committed.

        Raises:
            CapacityError: no room for them.
        """
        inputs = ForwardInputs()
        for segment, offset in zip(segments, offsets or [0] * len(segments), strict=True):
            table, first = self.tables[segment.sequence], len(inputs.positions)
            before = offset + segment.num_held  # rows of earlier forwards that stay
            if not self.reserve(segment.sequence, before + segment.num_rows):
                raise CapacityError(
                    f"out of KV blocks: {segment.num_rows} rows wanted, {self.num_free_tokens()} tokens free"
                )
            past = table.length + offset
            start, stop = past + segment.num_held, past + segment.num_held + segment.num_rows
            inputs.positions.extend(row_positions(segment, past))
            inputs.slots.extend(slots_of(table, start, stop, self.block_size))
            last = len(inputs.positions)
            blocks = tuple(table.blocks[: -(-stop // self.block_size)])
            slots = KeySlots(blocks, self.block_size, stop, self._device)
            inputs.readers.append(Reader(slice(first, last), slots, past, segment))
            inputs.wanted.extend(range(last - segment.num_logits, last))
            inputs.tapped.extend(range(last - segment.num_taps, last))
        self.decoder.rotary.cover(max(inputs.positions, default=-1) + 1)
        return inputs

    def commit(self, sequence: int, num_pending: int, path: Sequence[int] = ()) -> None:
        """Keep the pending rows and the nodes of `path`; a scattered path is moved to consecutive slots."""
        self._early.pop(sequence, None)
        table = self.tables[sequence]
        base = table.length + num_pending
        scattered = [(node, place) for place, node in enumerate(path) if node != place]
        if scattered:
            slots = slots_of(table, base, base + max(path) + 1, self.block_size)
            self.pool.move([slots[node] for node, _ in scattered], [slots[place] for _, place in scattered])
        table.length = base + len(path)
        assert table.length <= len(table.blocks) * self.block_size

    def rollback(self, sequence: int, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self._early.pop(sequence, None)
        self.allocator.rollback(self.tables[sequence], length)

    def check(self) -> None:
        """Assert that every block is free or held by an open sequence, and nothing is kept of others."""
        assert self._early.keys() <= self.tables.keys()
        self.allocator.check(list(self.tables.values()))
