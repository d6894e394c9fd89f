"""Attention whose result for a query depends on its text and position alone, to the last bit.

A sum over keys is rounded in an order that follows the number of keys, so a query always sees the same number: all keys
up to the next multiple of `KEY_BLOCK` after its position (from the multiple below where its window begins), gathered in
the order of their positions. Query heads of one key group, and positions that see the same keys, are rows of one matrix
product; as many rows as were proven to agree (`strict.prove`), down to one position per call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.fused import FusedAttention
from foretoken.model.attention.paged import KeySlots, Reader, read_values
from foretoken.model.interface import Segment
from foretoken.transfer import to_device

KEY_BLOCK = 64
# CPU kernels take 1, 2-3, and 4 or more rows by different routes, and torch's attention takes 32 at a time.
_ROW_STEP, _MAX_ROWS = 4, 32


@dataclass(frozen=True)
class Text:
    """Rows that continue one text: `rows[i]` of the flat run stands at position `first + i`.

    `slots` has the slot of every position up to the last row's, so a row reads the slots before and at its own
    position.
    """

    rows: Sequence[int]
    first: int
    slots: Tensor


@dataclass(frozen=True)
class _Read:
    """One call: n positions of a text that see the same C keys."""

    rows: Tensor  # [n]
    slots: Tensor  # [C]
    mask: Tensor  # [M, C], see `additive_mask`


class StrictAttention:
    """Writes the keys and values of rows `start` .. `start + len(write_slots)`, then reads text by text.

    `attend` may be given more rows than that: the rest is padding, which is neither stored nor read and gets zeros.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: KVPool,
        start: int,
        write_slots: Tensor,
        texts: Sequence[Text],
        positions_per_call: int,
    ) -> None:
        self.config, self.pool, self.start, self.write_slots = config, pool, start, write_slots
        self.texts, self.positions_per_call = texts, positions_per_call
        self._reads: dict[int | None, list[_Read]] = {}  # by window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        num_rows = len(self.write_slots)
        self.pool.write(layer, self.write_slots, key[:num_rows], value[:num_rows])
        window = self.config.window(layer)
        if window not in self._reads:
            self._reads[window] = [read for text in self.texts for read in self._plan(text, window, query)]
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for read in self._reads[window]:
            keys, values = self.pool.read(layer, read.slots)  # [G, C, K]
            rows = query.index_select(0, read.rows)
            out.index_copy_(0, read.rows, attend_together(rows, keys, values, read.mask, self.config, sinks))
        return out

    def _plan(self, text: Text, window: int | None, query: Tensor) -> Iterator[_Read]:
        """The calls for those rows of `text` that are in this pass, each over positions with the same key range."""
        stop = self.start + len(self.write_slots)
        places = [(text.first + i, row - self.start) for i, row in enumerate(text.rows) if self.start <= row < stop]
        for (low, high), members in groupby(places, lambda place: key_range(place[0], window)):
            some = list(members)
            for first in range(0, len(some), self.positions_per_call):
                positions, rows = zip(*some[first : first + self.positions_per_call], strict=True)
                # Slots after the last row may not be written yet: another key of the same text stands in for them,
                # masked.
                slots = text.slots[low : min(high, positions[-1] + 1)]
                slots = torch.cat((slots, slots[:1].expand(high - low - len(slots))))
                ago = torch.tensor(positions)[:, None] - torch.arange(low, high)  # [n, C]
                seen = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
                yield _Read(torch.tensor(rows, device=query.device), slots, additive_mask(seen, self.config).to(query))


def max_positions(config: ModelConfig) -> int:
    """Positions that one call may hold at most."""
    return max(1, _MAX_ROWS // (config.num_heads // config.num_kv_heads))


def padded_rows(num_positions: int, config: ModelConfig) -> int:
    """Rows of the product for so many positions: one per query head of a group, up to a multiple of `_ROW_STEP`."""
    return -(-num_positions * (config.num_heads // config.num_kv_heads) // _ROW_STEP) * _ROW_STEP


def additive_mask(seen: Tensor, config: ModelConfig) -> Tensor:
    """The float32 mask [M, C] of rows and padding (sees everything), from what each position sees, bool [n, C]."""
    rows = (
        torch.zeros(seen.shape, dtype=torch.float32)
        .masked_fill_(~seen, float("-inf"))
        .repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
    )
    return F.pad(rows, (0, 0, 0, padded_rows(len(seen), config) - len(rows)))


def attend_together(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, config: ModelConfig, sinks: Tensor | None
) -> Tensor:
    """`query` [n, H, K], `keys` and `values` [G, C, K], `mask` [M, C], `sinks` [H] -> [n, H, K]."""
    num_positions, heads, head_dim = query.shape
    groups, num_rows = keys.shape[0], num_positions * heads // keys.shape[0]
    rows = query.new_zeros(groups, len(mask), head_dim)
    rows[:, :num_rows] = (
        query.view(num_positions, groups, -1, head_dim).transpose(0, 1).reshape(groups, num_rows, head_dim)
    )
    column = None if sinks is None else _padded_sinks(sinks, groups, len(mask))
    read = read_values(rows[None], keys[None], values[None], mask[None, None], config, column)[0, :, :num_rows]
    return read.reshape(groups, num_positions, -1, head_dim).transpose(0, 1).reshape(num_positions, heads, head_dim)


def _padded_sinks(sinks: Tensor, num_groups: int, num_rows: int) -> Tensor:
    """`sinks` [H] as [G, M, 1] beside the scores of M rows: the heads of a group at each position, and padding."""
    own = sinks.view(num_groups, -1)
    return own.repeat(1, -(-num_rows // own.shape[1]))[:, :num_rows, None]


def key_range(position: int, window: int | None) -> tuple[int, int]:
    """First and last (exclusive) key position that a query at `position` is computed over: multiples of `KEY_BLOCK`."""
    low = 0 if window is None else max(0, position - window + 1) // KEY_BLOCK * KEY_BLOCK
    return low, (position // KEY_BLOCK + 1) * KEY_BLOCK


def texts_of(reader: Reader, device: torch.device, alone: bool = False) -> Iterator[Text]:
    """The texts of a segment's rows: one for a chain, one per leaf of a tree; with `alone`, one per row."""
    assert not reader.segment.num_held, "drafts grow their trees in default numerics"
    at = reader.slots.index
    slots = torch.arange(at.start, at.stop, device=device) if isinstance(at, range) else at
    first_row = reader.rows.start
    if reader.segment.is_chain and not alone:
        yield Text(range(first_row, reader.rows.stop), reader.past, slots)
        return
    for line, own in _lines(reader.segment, alone):
        new = torch.tensor(line, device=device) + reader.past
        first = reader.past + len(line) - len(own)
        yield Text([first_row + row for row in own], first, torch.cat((slots[: reader.past], slots[new])))


class PathAttention(FusedAttention):
    """`FusedAttention` where a row of a tree reads the path that it stands on as it would without the other branches.

    A column that a row does not see adds nothing to its sum, but it moves the columns behind it to other places, where
    the sum is rounded otherwise. So each path of a tree is a chain of its own, over blocks of one token.
    """

    def __init__(self, config: ModelConfig, pool: KVPool, write_slots: Tensor, readers: Sequence[Reader]) -> None:
        self._order: Tensor | None = None  # [T] the row that each row of the paths is
        if any(not reader.segment.is_chain for reader in readers):
            order, readers = _paths(readers)
            self._order = to_device(order, write_slots.device)
        super().__init__(config, pool, write_slots, readers)

    def _read(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        if self._order is None:
            return super()._read(layer, query, sinks)
        read = super()._read(layer, query.index_select(0, self._order), sinks)
        return torch.empty_like(read).index_copy_(0, self._order, read)


def _paths(readers: Sequence[Reader]) -> tuple[list[int], list[Reader]]:
    """The paths of all segments, each a chain over blocks of one token, and which row of the flat run each of their
    rows is. A row that several paths share belongs to one of them.
    """
    order, paths = list[int](), list[Reader]()
    for reader in readers:
        assert not reader.segment.num_held, "drafts grow their trees in default numerics"
        size, device = reader.slots.block_size, reader.slots.device
        slots = [block * size + place for block in reader.slots.blocks for place in range(size)]
        for line, own in _lines(reader.segment, alone=False):
            seen = (*slots[: reader.past], *(slots[reader.past + row] for row in line))
            rows, past = slice(len(order), len(order) + len(own)), len(seen) - len(own)
            order += [reader.rows.start + row for row in own]
            chain = Segment(reader.segment.sequence, len(own))
            paths.append(Reader(rows, KeySlots(seen, 1, len(seen), device), past, chain))
    return order, paths


def _lines(segment: Segment, alone: bool) -> Iterator[tuple[list[int], list[int]]]:
    """Lines from the first new row to a leaf, each with the rows at its end that no earlier line has answered for."""
    pending = segment.num_pending
    above = [*range(-1, pending - 1), *(pending - 1 if parent < 0 else pending + parent for parent in segment.parents)]
    taken: set[int] = set()
    for row in reversed(range(segment.num_rows)):  # parents stand before their children
        if row in taken:
            continue
        line = [row]
        while above[line[-1]] >= 0:
            line.append(above[line[-1]])
        line.reverse()
        own = [row] if alone else [other for other in line if other not in taken]
        taken.update(own)
        yield line, own
