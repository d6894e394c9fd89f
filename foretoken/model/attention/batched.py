"""Attention of a ragged batch in one call per layer, for a device where a call costs more than the rows it reads.

Segments are padded to the most rows and the most keys of their group and read together; a batch is split into groups
only where padding would cost more than another call. `paged.PagedAttention`, one call per segment, gives the same
result up to rounding and is what tests compare with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.kv.pool import KVPool
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import Reader, read_values, sink_column, visible_new
from foretoken.transfer import to_device

# Fetching a key costs about as much as multiplying it by this many query rows.
_ROWS_PER_FETCH = 16
# A group may cost this many times what its segments need, or this much in all: (rows + _ROWS_PER_FETCH) * keys.
_MAX_WASTE, _FREE_COST = 1.5, 65_536
# CUDA's kernels copy a mask whose rows are not a multiple of this.
_KEY_STEP = 16


@dataclass(frozen=True)
class _Tree:
    """New rows of a group that are not all chains: W new columns at most, held ones included."""

    visible: Tensor  # [n, Q, W] bool: which new columns each row sees
    column_depth: Tensor  # [n, W] position behind the past
    row_depth: Tensor  # [n, Q]


@dataclass(frozen=True)
class _Group:
    """n segments that one call reads, Q rows and C keys each; padding repeats a segment's last row and first slot."""

    num: int
    num_rows: int  # Q
    rows: Tensor  # [n * Q] of the flat run
    slots: Tensor  # [n * C]
    past: Tensor  # [n] tokens before this forward
    last_column: Tensor  # [n, Q] the row's own column, as long as its segment is a chain
    tree: _Tree | None
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window


class BatchedAttention:
    """Writes this forward's keys and values into the pool, then reads group by group."""

    def __init__(self, config: ModelConfig, pool: KVPool, write_slots: Tensor, readers: Sequence[Reader]) -> None:
        self.config, self.pool, self.write_slots = config, pool, write_slots
        self._groups, self._back = _plan(readers, write_slots.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `decoder.Attention`."""
        self.pool.write(layer, self.write_slots, key, value)
        window = self.config.window(layer)
        read = [self._read(layer, window, group, query, sinks) for group in self._groups]  # each [n * Q, H, K]
        return torch.cat(read).index_select(0, self._back)

    def _read(self, layer: int, window: int | None, group: _Group, query: Tensor, sinks: Tensor | None) -> Tensor:
        """One call for a group: `query` [T, H, K] -> [n * Q, H, K]. Query heads of one key group become rows."""
        num, num_rows, groups = group.num, group.num_rows, self.config.num_kv_heads
        heads, head_dim = query.shape[1:]
        keys, values = (
            gathered.view(groups, num, -1, head_dim).transpose(0, 1) for gathered in self.pool.read(layer, group.slots)
        )  # [n, G, C, K]
        rows = query.index_select(0, group.rows).view(num, num_rows, groups, -1, head_dim)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(num, groups, -1, head_dim)  # [n, G, H/G * Q, K]
        if window not in group.masks:
            group.masks[window] = _additive(_visible(group, window), heads // groups, query.dtype)
        column = sink_column(sinks, groups, num_rows)
        read = read_values(rows, keys, values, group.masks[window], self.config, column)
        read = read.view(num, groups, -1, num_rows, head_dim).permute(0, 3, 1, 2, 4)
        return read.reshape(num * num_rows, heads, head_dim)


def grouped(readers: Sequence[Reader]) -> list[list[int]]:
    """Indices of `readers` by the call they share: there are more calls for more different segments, not for more."""

    def cost(rows: int, keys: int) -> int:
        return (rows + _ROWS_PER_FETCH) * keys

    shapes = [(reader.segment.num_rows, len(reader.slots)) for reader in readers]
    # Rows by powers of two, so that what differs little in rows is sorted by keys.
    order = sorted(
        (i for i, (rows, _) in enumerate(shapes) if rows), key=lambda i: (shapes[i][0].bit_length(), shapes[i][1])
    )
    found: list[list[int]] = []
    max_rows = max_keys = needed = 0
    for i in reversed(order):
        rows, keys = max(max_rows, shapes[i][0]), max(max_keys, shapes[i][1])
        needed += cost(*shapes[i])
        if found and (len(found[-1]) + 1) * cost(rows, keys) <= max(_MAX_WASTE * needed, _FREE_COST):
            found[-1].append(i)
        else:
            found.append([i])
            rows, keys = shapes[i]
            needed = cost(rows, keys)
        max_rows, max_keys = rows, keys
    return found


def _plan(readers: Sequence[Reader], device: torch.device) -> tuple[list[_Group], Tensor]:
    """The groups, and for each row of the flat run its place in what they read, [T]. One copy to the device."""
    members = [[readers[i] for i in indices] for indices in grouped(readers)]
    most = [
        (max(reader.segment.num_rows for reader in some), max(len(reader.slots.blocks) for reader in some))
        for some in members
    ]
    back = [0] * sum(reader.segment.num_rows for reader in readers)
    numbers: list[int] = []
    first = 0  # place of the group's first row
    for some, (num_rows, num_blocks) in zip(members, most, strict=True):
        for reader in some:
            start, own = reader.rows.start, reader.segment.num_rows
            back[reader.rows] = range(first, first + own)
            first += num_rows
            numbers += (*range(start, start + own), *([start + own - 1] * (num_rows - own)))
        numbers += (reader.past for reader in some)
        numbers += (reader.past + reader.segment.num_held for reader in some)
        numbers += (reader.segment.num_rows for reader in some)
        numbers += (len(reader.slots) for reader in some)
        for reader in some:
            blocks = reader.slots.blocks
            numbers += (*blocks, *([blocks[0]] * (num_blocks - len(blocks))))
    sizes = [
        len(some) * (num_rows + 4 + num_blocks) for some, (num_rows, num_blocks) in zip(members, most, strict=True)
    ]
    *parts, places = to_device([*numbers, *back], device).split_with_sizes([*sizes, len(back)])
    groups = [_group(some, num_rows, part) for some, (num_rows, _), part in zip(members, most, parts, strict=True)]
    return groups, places


def _group(readers: Sequence[Reader], num_rows: int, numbers: Tensor) -> _Group:
    """The group of `readers`, from its numbers on the device, in the order in which `_plan` lays them out."""
    num, device, size = len(readers), numbers.device, readers[0].slots.block_size
    rows, past, first_column, own, num_keys, blocks = numbers.split_with_sizes(
        [num * num_rows, num, num, num, num, len(numbers) - num * (num_rows + 4)]
    )
    max_keys = -(-max(len(reader.slots) for reader in readers) // _KEY_STEP) * _KEY_STEP
    columns = torch.arange(max_keys, device=device).expand(num, -1)  # [n, C]
    columns = columns.where(columns < num_keys[:, None], 0)
    slots = blocks.view(num, -1).gather(1, columns // size) * size + columns % size
    row = torch.arange(num_rows, device=device).minimum(own[:, None] - 1)  # [n, Q]
    tree = None if all(reader.segment.is_chain for reader in readers) else _tree(readers, num_rows, device)
    return _Group(num, num_rows, rows, slots.flatten(), past, first_column[:, None] + row, tree)


def _tree(readers: Sequence[Reader], num_rows: int, device: torch.device) -> _Tree:
    """What the new rows see of each other, padded to `num_rows` rows and the most new columns of the group."""
    found = [visible_new(reader.segment) for reader in readers]
    most = max(len(depth) for _, depth in found)
    visible = torch.zeros(len(readers), num_rows, most, dtype=torch.bool)
    column_depth = torch.zeros(len(readers), most, dtype=torch.int64)
    row_depth = torch.zeros(len(readers), num_rows, dtype=torch.int64)
    for i, (reader, (new, depth)) in enumerate(zip(readers, found, strict=True)):
        own = new[reader.segment.num_held :]
        visible[i, : len(own), : len(depth)] = own
        column_depth[i, : len(depth)] = torch.tensor(depth)
        row_depth[i, : len(own)] = column_depth[i, len(depth) - len(own) : len(depth)]
    depths = to_device(torch.cat((column_depth, row_depth), dim=1), device)
    return _Tree(to_device(visible, device, None), depths[:, :most], depths[:, most:])


def _visible(group: _Group, window: int | None) -> Tensor:
    """Which keys each row sees, bool [n, Q, C]; what rows that are padding see does not matter."""
    columns = torch.arange(len(group.slots) // group.num, device=group.slots.device)  # [C]
    if group.tree is None:
        visible = columns <= group.last_column[:, :, None]
        return visible if window is None else visible & (columns > group.last_column[:, :, None] - window)
    tree, past = group.tree, group.past[:, None]  # [n, 1]
    behind = columns - past  # [n, C] number of the new column, negative in the past
    most = tree.visible.shape[2]
    at = behind.clamp(0, most - 1)
    new = tree.visible.gather(2, at[:, None].expand(-1, group.num_rows, -1)) & (behind < most)[:, None]
    visible = (behind < 0)[:, None] | new
    if window is None:
        return visible
    position = columns.where(behind < 0, past + tree.column_depth.gather(1, at))  # [n, C]
    return visible & ((past + tree.row_depth)[:, :, None] - position[:, None] < window)


def _additive(visible: Tensor, per_group: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: bool [n, Q, C] -> [n, 1, per_group * Q, C] of `dtype`."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return mask.repeat(1, per_group, 1)[:, None]
