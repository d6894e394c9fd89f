"""Block tables: nothing leaks, nothing is written twice, and a sequence reads back exactly what it committed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from foretoken.kv.blocks import BlockAllocator, BlockTable, slots_of

SIZE = 4


def grow(allocator: BlockAllocator, table: BlockTable, num_rows: int) -> None:
    assert allocator.reserve(table, num_rows) == []
    table.length += num_rows


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (SIZE, 1), (SIZE + 1, 2), (3 * SIZE, 3)])
def test_reserve_takes_whole_blocks_and_free_gives_them_back(tokens: int, blocks: int) -> None:
    allocator, table = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, table, tokens)
    assert (len(table.blocks), allocator.num_used, allocator.num_free) == (blocks, blocks, 8 - blocks)
    allocator.free(table)
    assert (table.blocks, table.length, allocator.num_free) == ([], 0, 8)
    allocator.check([])


def test_reserve_counts_the_room_that_is_there_already() -> None:
    allocator, table = BlockAllocator(2, SIZE), BlockTable()
    grow(allocator, table, SIZE - 1)
    assert allocator.reserve(table, 1) == []
    assert allocator.reserve(table, 1) == []  # reserving is no commit: the same row is asked for twice
    assert len(table.blocks) == 1


def test_a_refused_reserve_changes_nothing() -> None:
    allocator, table, other = BlockAllocator(3, SIZE), BlockTable(), BlockTable()
    grow(allocator, table, SIZE)
    grow(allocator, other, 2 * SIZE)
    before = list(table.blocks)
    assert allocator.reserve(table, 1) is None
    assert (table.blocks, table.length, allocator.num_free) == (before, SIZE, 0)
    allocator.check([table, other])


def test_rollback_gives_back_only_empty_blocks() -> None:
    allocator, table = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, table, 3 * SIZE)
    first = table.blocks[0]
    for length, blocks in ((2 * SIZE + 1, 3), (2 * SIZE, 2), (1, 1), (0, 0)):
        allocator.rollback(table, length)
        assert (table.length, len(table.blocks), allocator.num_used) == (length, blocks, blocks)
        assert table.blocks[:1] == ([first] if blocks else [])


def test_rollback_also_gives_back_blocks_that_were_only_reserved() -> None:
    allocator, table = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, table, 2)
    allocator.reserve(table, 5 * SIZE)
    allocator.rollback(table, 2)
    assert allocator.num_used == 1


def test_fork_shares_every_block_until_one_is_written() -> None:
    allocator, parent = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, parent, SIZE + 2)
    child = allocator.fork(parent)
    assert (child.blocks, child.length) == (parent.blocks, parent.length)
    assert allocator.num_used == 2
    copies = allocator.reserve(child, 1)
    assert copies == [(parent.blocks[1], child.blocks[1])]  # only the half-filled block is copied
    assert child.blocks[0] == parent.blocks[0]
    assert allocator.reserve(parent, 1) == []  # now nobody else holds it
    allocator.check([parent, child])


def test_fork_at_a_block_edge_copies_nothing() -> None:
    allocator, parent = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, parent, 2 * SIZE)
    child = allocator.fork(parent)
    assert allocator.reserve(child, 1) == []
    assert allocator.reserve(parent, 1) == []
    assert child.blocks[:2] == parent.blocks[:2]
    assert child.blocks[2] != parent.blocks[2]


def test_fork_does_not_share_blocks_that_are_only_reserved() -> None:
    allocator, parent = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, parent, 2)
    allocator.reserve(parent, 2 * SIZE)
    child = allocator.fork(parent)
    assert len(child.blocks) == 1
    allocator.free(child)
    allocator.check([parent])


def test_rollback_into_a_shared_block_still_copies_before_writing() -> None:
    allocator, parent = BlockAllocator(8, SIZE), BlockTable()
    grow(allocator, parent, 2 * SIZE)
    child = allocator.fork(parent)
    allocator.rollback(child, SIZE + 1)
    copies = allocator.reserve(child, 1)
    assert copies == [(parent.blocks[1], child.blocks[1])]
    assert child.blocks[1] != parent.blocks[1]
    allocator.check([parent, child])


def test_copy_on_write_that_does_not_fit_changes_nothing() -> None:
    allocator, parent = BlockAllocator(2, SIZE), BlockTable()
    grow(allocator, parent, SIZE + 1)
    child = allocator.fork(parent)
    assert allocator.reserve(child, 1) is None  # the copy itself needs a block
    assert child.blocks == parent.blocks
    allocator.check([parent, child])


def test_freeing_one_of_two_owners_keeps_the_blocks() -> None:
    allocator, parent = BlockAllocator(4, SIZE), BlockTable()
    grow(allocator, parent, SIZE)
    child = allocator.fork(parent)
    allocator.free(parent)
    assert allocator.num_used == 1
    allocator.free(child)
    assert allocator.num_free == 4


def test_check_sees_a_leak_and_a_lost_block() -> None:
    allocator, table = BlockAllocator(4, SIZE), BlockTable()
    grow(allocator, table, SIZE)
    with pytest.raises(AssertionError, match="leaked"):
        allocator.check([])
    allocator.free(BlockTable(list(table.blocks), SIZE))
    with pytest.raises(AssertionError, match="leaked"):
        allocator.check([table])
    with pytest.raises(AssertionError, match="free block"):
        allocator.free(table)


def test_a_lone_sequence_stays_in_one_piece() -> None:
    allocator, table = BlockAllocator(8, SIZE), BlockTable()
    for _ in range(8 * SIZE):
        grow(allocator, table, 1)
    assert slots_of(table, 0, 8 * SIZE, SIZE) == range(8 * SIZE)


def test_sequences_that_grow_in_turn_stay_in_one_piece_while_there_is_room() -> None:
    allocator, tables = BlockAllocator(32, SIZE), [BlockTable() for _ in range(4)]
    for _ in range(4 * SIZE):
        for table in tables:
            grow(allocator, table, 1)
    assert all(isinstance(slots_of(table, 0, table.length, SIZE), range) for table in tables)


def test_slots_of_scattered_blocks() -> None:
    table = BlockTable([5, 6, 2], 3 * SIZE)
    assert slots_of(table, 0, 2 * SIZE, SIZE) == range(20, 28)
    assert slots_of(table, 2, 6, SIZE) == range(22, 26)
    assert slots_of(table, 6, 10, SIZE) == [26, 27, 8, 9]
    assert slots_of(table, 9, 11, SIZE) == range(9, 11)  # inside one block: a run again
    assert list(slots_of(table, 3, 3, SIZE)) == []


class Twin(RuleBasedStateMachine):
    """Random programs on the allocator and on plain lists: memory is a list with one token per slot."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(9, SIZE)
        self.memory: list[int | None] = [None] * (9 * SIZE)
        self.tables: dict[int, BlockTable] = {}
        self.texts: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}  # of a sequence and all that begin with its blocks
        self.published: list[tuple[str, list[int]]] = []
        self.count = 0  # every token ever written is another one: a stale slot cannot look right

    def new(self, table: BlockTable, text: list[int], salt: str) -> int:
        self.count += 1
        self.tables[self.count], self.texts[self.count], self.salts[self.count] = table, text, salt
        return self.count

    @rule(target=sequences, salt=st.sampled_from("ab"))
    def open(self, salt: str) -> int:
        return self.new(BlockTable(), [], salt)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        return self.new(self.allocator.fork(self.tables[parent]), list(self.texts[parent]), self.salts[parent])

    @rule(sequence=sequences, num_rows=st.integers(1, 11), data=st.data())
    def write_and_commit_some(self, sequence: int, num_rows: int, data: st.DataObject) -> None:
        """Write rows, keep an increasing choice of them (a tree path) and forget the others."""
        table = self.tables[sequence]
        free, held = self.allocator.num_free, list(table.blocks)
        copies = self.allocator.reserve(table, num_rows)
        if copies is None:
            assert (self.allocator.num_free, table.blocks) == (free, held)
            return
        for source, destination in copies:
            self.memory[destination * SIZE : (destination + 1) * SIZE] = self.memory[
                source * SIZE : (source + 1) * SIZE
            ]
        slots = slots_of(table, table.length, table.length + num_rows, SIZE)
        for slot in slots:
            self.count += 1
            self.memory[slot] = self.count
        path = sorted(data.draw(st.sets(st.integers(0, num_rows - 1))))
        kept = [self.memory[slots[row]] for row in path]
        for place, token in enumerate(kept):
            self.memory[slots[place]] = token
        table.length += len(path)
        self.texts[sequence].extend(kept)  # type: ignore[arg-type]

    @rule(sequence=sequences, share=st.floats(0, 1))
    def rollback(self, sequence: int, share: float) -> None:
        length = int(share * len(self.texts[sequence]))
        self.allocator.rollback(self.tables[sequence], length)
        del self.texts[sequence][length:]

    @rule(sequence=sequences)
    def publish(self, sequence: int) -> None:
        salt = self.salts[sequence]
        self.allocator.publish(self.tables[sequence], salt, self.texts[sequence])
        self.published.append((salt, list(self.texts[sequence])))
        whole = len(self.texts[sequence]) // SIZE
        assert len(self.allocator._index.find(salt, self.texts[sequence])) == whole, "as if it were published anew"

    @precondition(lambda self: self.published)
    @rule(target=sequences, data=st.data())
    def adopt(self, data: st.DataObject) -> int:
        """Begin with a text that was published once, or with its beginning; what is found must still stand in
        memory.
        """
        salt, text = data.draw(st.sampled_from(self.published))
        wanted = [*text[: data.draw(st.integers(0, len(text)))], 0]
        table = BlockTable()
        length = self.allocator.adopt(table, salt, wanted)
        assert length == table.length < len(wanted)
        assert length % SIZE == 0
        return self.new(table, wanted[:length], salt)

    @rule(target=sequences, sequence=consumes(sequences))
    def free(self, sequence: int) -> object:
        self.allocator.free(self.tables.pop(sequence))
        del self.texts[sequence]
        return multiple()

    @invariant()
    def each_reads_back_what_it_committed(self) -> None:
        for sequence, text in self.texts.items():
            table = self.tables[sequence]
            assert table.length == len(text)
            assert [self.memory[slot] for slot in slots_of(table, 0, table.length, SIZE)] == text

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.allocator.check(list(self.tables.values()))


Twin.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestTwin = Twin.TestCase


@pytest.mark.parametrize("num_rows", [3, 9])
def test_s4_short_sequences_use_the_same_blocks_again(num_rows: int) -> None:
    """A pool takes memory where it was written: sequences that come and go must not write all of it in time."""
    allocator, rng = BlockAllocator(4096, 8), random.Random(0)
    tables: list[BlockTable] = []
    written = set[int]()
    for _ in range(4000):
        if len(tables) == 16 or (tables and rng.random() < 0.4):
            allocator.free(tables.pop(rng.randrange(len(tables))))
        tables.append(BlockTable())
        assert allocator.reserve(tables[-1], rng.randint(1, num_rows)) == []
        written |= set(tables[-1].blocks)
    assert len(written) <= 128


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs, in whatever it calls too."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_taking_a_block_does_not_take_longer_in_a_larger_pool() -> None:
    """Nearly all blocks keep a text, as on a server that has run for a while: the empty ones are far between."""
    counts = []
    for num_blocks in (64, 2048):
        allocator = BlockAllocator(num_blocks, SIZE)
        table = BlockTable()
        grow(allocator, table, num_blocks * SIZE)
        allocator.publish(table, "", range((num_blocks - 1) * SIZE))
        allocator.free(table)
        counts.append(lines_of(partial(allocator.reserve, BlockTable(), 1)))
        assert allocator.num_kept == num_blocks - 1
    assert counts[1] < counts[0] + 20


def test_s4_a_pool_is_used_to_its_end_all_the_same() -> None:
    allocator = BlockAllocator(50, 4)
    tables = [BlockTable() for _ in range(50)]
    assert all(allocator.reserve(table, 4) == [] for table in tables)
    assert sorted(block for table in tables for block in table.blocks) == list(range(50))
    assert allocator.reserve(BlockTable(), 1) is None
    for table in tables:
        allocator.free(table)
    long = BlockTable()
    assert allocator.reserve(long, 200) == []
    assert long.blocks == list(range(50))
