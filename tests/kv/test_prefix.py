"""Prefix reuse: what is found is what was published, tenants never meet, and room is made from what was unused
longest.
"""

from __future__ import annotations

from typing import Any

from foretoken.kv.blocks import BlockAllocator, BlockTable
from foretoken.kv.prefix import shared_length
from tests.kv.test_blocks import lines_of

SIZE = 4
TEXT = list(range(100, 120))


def hold(allocator: BlockAllocator, text: list[int], salt: str = "") -> BlockTable:
    """A sequence that ran `text` and published it."""
    table = BlockTable()
    assert allocator.reserve(table, len(text)) == []
    table.length = len(text)
    allocator.publish(table, salt, text)
    return table


def adopt(allocator: BlockAllocator, text: list[int], salt: str = "") -> BlockTable:
    table = BlockTable()
    allocator.adopt(table, salt, text)
    return table


def test_a_running_text_is_shared_and_a_finished_one_is_kept() -> None:
    allocator = BlockAllocator(16, SIZE)
    first = hold(allocator, TEXT[:10])
    second = adopt(allocator, TEXT)
    assert (second.length, second.blocks) == (8, first.blocks[:2])  # full blocks only
    assert allocator.num_used == 3
    allocator.free(first)
    allocator.free(second)
    assert allocator.num_free == 16
    third = adopt(allocator, TEXT[:9])
    assert third.length == 8
    assert allocator.num_used == 2
    allocator.check([third])
    assert allocator.prefix_stats.num_found_tokens == 16
    assert allocator.prefix_stats.num_looked_up_tokens == 29


def test_the_last_token_is_always_left_to_run() -> None:
    allocator = BlockAllocator(16, SIZE)
    hold(allocator, TEXT[:8])
    assert [adopt(allocator, TEXT[:n]).length for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 4, 4, 8]


def test_salts_never_meet() -> None:
    allocator = BlockAllocator(16, SIZE)
    hold(allocator, TEXT, salt="one")
    assert adopt(allocator, TEXT, salt="two").length == 0
    assert adopt(allocator, TEXT).length == 0
    assert adopt(allocator, TEXT, salt="one").length == 16


def test_a_block_counts_with_all_that_stands_before_it() -> None:
    """The same four tokens after another beginning are another block."""
    allocator = BlockAllocator(16, SIZE)
    hold(allocator, [1, 1, 1, 1, 5, 5, 5, 5])
    assert adopt(allocator, [2, 2, 2, 2, 5, 5, 5, 5, 0]).length == 0
    hold(allocator, [2, 2, 2, 2, 6, 6, 6, 6])
    assert adopt(allocator, [2, 2, 2, 2, 5, 5, 5, 5, 0]).length == 4


def test_what_was_unused_longest_makes_room_its_end_first() -> None:
    allocator = BlockAllocator(6, SIZE)
    for salt in "ab":
        allocator.free(hold(allocator, TEXT[:12], salt))
    new = BlockTable()
    assert allocator.reserve(new, 2 * SIZE) == []
    assert adopt(allocator, TEXT, "b").length == 12
    assert adopt(allocator, TEXT, "a").length == 4
    assert allocator.prefix_stats.num_evicted_blocks == 2


def test_a_block_that_is_written_again_is_forgotten() -> None:
    """A draft's cache rolls back committed draft tokens: what stood there must not be found under its old text."""
    allocator = BlockAllocator(8, SIZE)
    table = hold(allocator, TEXT[:8])
    allocator.rollback(table, 6)
    assert adopt(allocator, TEXT).length == 8  # nothing was written yet
    allocator = BlockAllocator(8, SIZE)
    table = hold(allocator, TEXT[:8])
    allocator.rollback(table, 6)
    assert allocator.reserve(table, 1) == []
    assert adopt(allocator, TEXT).length == 4


def test_two_that_ran_the_same_text_at_once() -> None:
    """The first block that was published stays the known one; the other is an ordinary block."""
    allocator = BlockAllocator(8, SIZE)
    one, two = hold(allocator, TEXT[:8]), hold(allocator, TEXT[:8])
    assert adopt(allocator, TEXT).blocks == one.blocks
    allocator.free(two)
    assert allocator.num_free == 6


def test_a_tenant_whose_blocks_are_gone_is_forgotten() -> None:
    """Any number of tenants over time: no more is kept of them than blocks can hold, and those that are known are
    found.
    """
    allocator = BlockAllocator(6, 2)
    for number in range(300):
        salt, text = f"tenant {number}", [number, 1, number, 2, number, 3]
        table = BlockTable()
        allocator.adopt(table, salt, text)
        assert allocator.reserve(table, 6 - table.length) is not None
        table.length = 6
        allocator.publish(table, salt, text)
        assert allocator._index.find(salt, text) == table.blocks
        allocator.free(table)
        allocator.check([])
    index = allocator._index
    assert len(index._roots) == len(index._salts) <= 6
    assert sum(index._num_behind.values()) == len(index._blocks) <= 6


def test_states_are_attached_to_the_known_blocks_of_a_text() -> None:
    """By owner and salt; the first states of a block stay."""
    allocator = BlockAllocator(8, SIZE)
    table = hold(allocator, TEXT[:12])
    allocator.attach(table, "", TEXT, 2, "head", letters)
    assert allocator.attached("", TEXT, "head") == ["a", "b"]
    assert allocator.attached("", TEXT[:7], "head") == ["a"]
    assert allocator.attached("", TEXT, "other") == allocator.attached("b", TEXT, "head") == []
    allocator.attach(table, "", TEXT, 4, "head", lambda first, stop: letters(first, stop).upper())
    assert allocator.attached("", TEXT, "head") == ["a", "b", "C"]  # the fourth is not published
    allocator.attach(table, "", TEXT, 3, "other", lambda *_: "")  # it failed to make any
    assert allocator.attached("", TEXT, "other") == []
    allocator.free(table)
    assert allocator.attached("", TEXT, "head") == ["a", "b", "C"]  # kept blocks keep theirs


def letters(first: int, stop: int) -> str:
    """A state for each of some blocks."""
    return "abcdefgh"[first:stop]


def test_states_are_attached_to_whichever_blocks_stand_for_the_text() -> None:
    """The sequence that ran its beginning first has no drafter with states."""
    allocator = BlockAllocator(7, SIZE)
    hold(allocator, TEXT[:8])
    second = hold(allocator, TEXT)
    allocator.attach(second, "", TEXT, 4, "head", letters)
    assert second.num_published == 0
    assert allocator.attached("", TEXT, "head") == [*"abcd"]
    third = adopt(allocator, TEXT)
    allocator.publish(third, "", TEXT)
    asked: list[tuple[int, int]] = []
    allocator.attach(third, "", TEXT, 4, "head", lambda *which: asked.append(which) or letters(*which))
    allocator.attach(third, "", TEXT, 4, "new", lambda *which: asked.append(which) or letters(*which))
    assert asked == [(0, 4)]
    assert allocator.attached("", TEXT, "new") == [*"abcd"]


def test_states_go_when_a_block_is_given_away_or_written_again() -> None:
    allocator = BlockAllocator(3, SIZE)
    table = hold(allocator, TEXT[:8])
    allocator.attach(table, "", TEXT, 2, "head", letters)
    allocator.rollback(table, 6)
    assert allocator.reserve(table, 1) == []
    assert allocator.attached("", TEXT, "head") == ["a"]
    allocator.free(table)
    assert allocator.reserve(BlockTable(), 3 * SIZE) == []
    assert allocator.attached("", TEXT, "head") == []
    assert not allocator._index._attached


def test_no_more_is_adopted_than_allowed() -> None:
    """In whole blocks; what is shared with a running text is counted the same way."""
    allocator = BlockAllocator(8, SIZE)
    held = hold(allocator, TEXT[:12])
    for most, expected in ((None, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0)):
        table = BlockTable()
        assert allocator.adopt(table, "", TEXT, most) == expected
        assert allocator.num_shared_tokens("", TEXT, most) == expected
        allocator.free(table)
    allocator.check([held])


class Read(list[int]):
    """Tokens that count how many of them were read."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_piece_of_a_prompt_is_published_without_reading_what_stands_before_it() -> None:
    allocator, table, text = BlockAllocator(256, SIZE), BlockTable(), Read(range(800))
    made: list[int] = []  # states
    for piece in range(100):
        assert allocator.reserve(table, 2 * SIZE) == []
        table.length += 2 * SIZE
        allocator.publish(table, "", text)
        allocator.attach(
            table, "", text, 2 * piece + 1, "head", lambda *which: made.extend(range(*which)) or range(*which)
        )
    assert text.num_read == 800
    assert made == [*range(199)]
    assert allocator.attached("", [*text], "head") == made
    assert adopt(allocator, list(range(801))).length == 800


def test_what_is_published_anew_is_found_whole_whatever_became_of_its_blocks() -> None:
    """Another one that ran the same text comes first and goes; the text is taken back, and forgotten for all."""
    allocator = BlockAllocator(8, SIZE)
    first = hold(allocator, TEXT[:8])
    second = hold(allocator, TEXT[:16])  # of its own blocks only the last two are found
    assert second.num_published == 0
    allocator.free(first)
    evicting = BlockTable()
    assert allocator.reserve(evicting, 4 * SIZE) == []
    assert adopt(allocator, TEXT).length == 0
    allocator.publish(second, "", TEXT[:16])
    assert (second.num_published, allocator.num_shared_tokens("", TEXT)) == (4, 16)
    allocator.rollback(second, 6)
    assert allocator.reserve(second, SIZE) == []
    second.length = 8
    other = [*TEXT[:6], 1, 2]
    allocator.publish(second, "", other)
    assert [allocator.num_shared_tokens("", [*text, 0]) for text in (TEXT, other)] == [4, 8]
    allocator.drop_prefixes()
    allocator.publish(second, "", other)
    assert allocator.num_shared_tokens("", [*other, 0]) == 8


def test_looking_for_an_unknown_text_reads_its_first_block() -> None:
    allocator, text = BlockAllocator(16, SIZE), Read(range(1000))
    hold(allocator, TEXT)
    assert allocator.num_shared_tokens("", text) == 0
    assert text.num_read == SIZE


def test_the_common_beginning_of_long_texts_is_found_without_a_loop_over_it() -> None:
    text = list(range(5000))
    for length in (0, 1, 255, 256, 257, 512, 4999, 5000):
        other = [*text[:length], -1, *text[length:]]
        for mine in (text, text[:length], text[: length + 1]):
            assert shared_length(mine, other) == shared_length(tuple(other), mine) == length
    assert lines_of(lambda: shared_length(text, [*text, 1])) < 700
