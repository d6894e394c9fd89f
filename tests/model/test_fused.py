"""The batch that the paged kernel reads says what torch's attention says of it; the kernel itself: `interpreted/`."""

from __future__ import annotations

import random

import pytest
import torch

from foretoken.kernels.paged_work import SPAN_COLUMNS, PagedWork, tile_columns, tile_lines
from foretoken.model.attention import fused
from foretoken.model.attention.fused import work_of
from foretoken.model.attention.paged import KeySlots, Reader, visible_slots
from foretoken.model.interface import Segment
from tests.model.test_batched import BLOCK, CPU, config, random_readers

FIELDS = ("past", "columns", "rows", "first_row", "first_block", "first_distance", "part_spans", "first_part_row")


def segments_of(work: PagedWork, count: int) -> list[dict[str, int]]:
    rows = work.segments[: count * len(FIELDS)].view(count, -1).tolist()
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def seen(work: PagedWork, segment: dict[str, int], window: int | None) -> torch.Tensor:
    """Which columns each row sees, as the kernel reads it: one row and one column at a time."""
    past, columns = segment["past"], segment["columns"]
    found = torch.zeros(segment["rows"], columns, dtype=torch.bool)
    for row in range(segment["rows"]):
        position = int(work.positions[segment["first_row"] + row])
        for column in range(columns):
            distance = position - column
            if segment["first_distance"] >= 0 and column >= past:
                at = segment["first_distance"] + row * (columns - past) + column - past
                distance = int(work.distances[at])
            found[row, column] = 0 <= distance < (window or 10**9)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_see_what_they_see_there(seed: int) -> None:
    readers = random_readers(random.Random(seed), 4)
    work = work_of(readers, config(6, 2, (None,)), CPU)
    assert work.has_trees == any(not reader.segment.is_chain for reader in readers)
    for reader, segment in zip(readers, segments_of(work, len(readers)), strict=True):
        blocks = work.blocks[segment["first_block"] :][: len(reader.slots.blocks)]
        assert tuple(blocks.tolist()) == reader.slots.blocks
        for window in (None, 20, 3):
            assert torch.equal(seen(work, segment, window), visible_slots(reader.segment, reader.past, window))


def reader_of(first: int, past: int, num_rows: int) -> Reader:
    size = past + num_rows
    slots = KeySlots(tuple(range(-(-size // BLOCK))), BLOCK, size, CPU)
    return Reader(slice(first, first + num_rows), slots, past, Segment(first, num_rows))


def test_every_row_has_one_tile_and_a_place_in_every_part() -> None:
    """A long text of few rows is shared among programs, a short one and a prompt are not."""
    shapes = ((3 * SPAN_COLUMNS, 5), (10, 1), (2 * SPAN_COLUMNS, 500), (SPAN_COLUMNS, 2))
    readers, first = list[Reader](), 0
    for past, num_rows in shapes:
        readers.append(reader_of(first, past, num_rows))
        first += num_rows
    work = work_of(readers, config(6, 2, (None,)), CPU)
    per_tile = tile_lines(3, 16) // 3
    tiles = work.tiles[: 2 * work.num_tiles].view(-1, 2).tolist()
    assert tiles == [[i, row] for i, (_, rows) in enumerate(shapes) for row in range(0, rows, per_tile)]
    assert [one["part_spans"] for one in segments_of(work, 4)] == [1, 1, 3, 1]
    merged = work.merged[: 4 * work.num_merged].view(-1, 4).tolist()
    assert [(row, parts) for row, _, _, parts in merged] == [
        *((row, 4) for row in range(5)),
        *((506 + row, 2) for row in range(2)),
    ]
    places = [place + part * step for _, place, step, parts in merged for part in range(parts)]
    assert sorted(places) == list(range(work.num_part_rows))
    assert work.num_parts == 4


def test_memory_for_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_MAX_PART_LINES", 6 * 2 * 3)  # six heads, two rows of three spans together
    work = work_of([reader_of(row, 2 * SPAN_COLUMNS, 1) for row in range(3)], config(6, 2, (None,)), CPU)
    assert [one["part_spans"] for one in segments_of(work, 3)] == [1, 1, 3]
    assert work.num_part_rows == 6


def test_vectors_begin_where_one_compiled_kernel_serves_them_all() -> None:
    for seed in range(4):
        work = work_of(random_readers(random.Random(seed), 3), config(4, 2, (None,)), CPU)
        vectors = (work.segments, work.tiles, work.merged, work.blocks, work.positions, work.distances)
        assert {one.storage_offset() % 4 for one in vectors} == {0}


def test_tiles_follow_from_the_model() -> None:
    """Powers of two that divide a span; as many lines as a group has heads, at least."""
    for head_dim in (16, 20, 64, 80, 96, 128, 256):
        for itemsize in (2, 4):
            assert SPAN_COLUMNS % tile_columns(head_dim, itemsize) == 0
        assert [tile_lines(heads, head_dim) >= max(16, heads) for heads in (1, 3, 8, 71)] == [True] * 4
    assert (tile_lines(4, 128), tile_lines(4, 256), tile_lines(4, 64), tile_lines(71, 64)) == (32, 16, 32, 128)
    assert (tile_columns(128, 2), tile_columns(256, 2), tile_columns(128, 4)) == (64, 32, 16)
