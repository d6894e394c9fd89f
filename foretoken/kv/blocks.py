"""Block tables: which slots of the pool belong to which sequence.

A slot holds one token's keys and values; a block is `block_size` neighbouring slots. Blocks are reference-counted so
that a fork shares its past; a shared block is copied before anyone writes into it. Blocks of one sequence are kept
adjacent where that is free of charge: an unbroken run can be read without a gather.

A full block whose text was published stays readable when no sequence holds it any more, until its place is needed: a
later sequence that begins with the same text adopts it (`prefix`). Such blocks count as free and are evicted least
recently used first.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from foretoken.kv.prefix import PrefixIndex, PrefixStats, StatesOf

_FIRST_REACH = 16  # blocks
_RUN = re.compile(b"\1+")  # of empty blocks
_ROOM = 4  # times what is wanted, which a run must have: a sequence begins in its middle


@dataclass
class BlockTable:
    """The blocks of one sequence, and how many committed tokens they hold.

    The first `num_published` blocks stood for their text in the prefix index when they were last published.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    num_published: int = 0


class BlockAllocator:
    """Hands out blocks of a fixed pool; free + used = total at all times."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks, self.block_size = num_blocks, block_size
        self._references = [0] * num_blocks
        self._num_free = num_blocks
        self._reach = min(_FIRST_REACH, num_blocks)  # blocks from the start of the pool that are handed out for now
        self._index = PrefixIndex(block_size)
        # Published blocks without a holder, least recently used first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # By block 1 where nobody holds it and no text is kept, as bytes: their runs are found without a loop.
        self._is_empty = bytearray(b"\1" * num_blocks)
        self.prefix_stats = PrefixStats()

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return self._num_free

    @property
    def num_kept(self) -> int:
        """Published blocks that no sequence holds: free, and still readable."""
        return len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold, shared ones counted once."""
        return sum(count > 0 for count in self._references)

    def reserve(self, table: BlockTable, num_rows: int) -> list[tuple[int, int]] | None:
        """Make `table` able to take `num_rows` more tokens.

        Returns the block copies (source, destination) the caller must carry out first, or None, with nothing changed,
        when there are not enough free blocks.
        """
        size = self.block_size
        needed = -(-(table.length + num_rows) // size) - len(table.blocks)
        first_written = table.length // size
        shared = [i for i in range(first_written, len(table.blocks)) if self._references[table.blocks[i]] > 1]
        if max(needed, 0) + len(shared) > self._num_free:
            return None
        for block in table.blocks[first_written:]:
            if self._references[block] == 1:
                self._index.remove(block)  # its text is about to change
        copies = []
        for index in shared:
            copy = self._take(after=table.blocks[index - 1] if index else None)
            copies.append((table.blocks[index], copy))
            self._drop(table.blocks[index])
            table.blocks[index] = copy
        for left in range(needed, 0, -1):
            table.blocks.append(self._take(after=table.blocks[-1] if table.blocks else None, num_wanted=left))
        return copies

    def fork(self, table: BlockTable) -> BlockTable:
        """A second sequence with the same past, sharing its blocks."""
        keep = -(-table.length // self.block_size)
        child = BlockTable(table.blocks[:keep], table.length)
        for block in child.blocks:
            self._references[block] += 1
        return child

    def adopt(self, table: BlockTable, salt: str, tokens: Sequence[int], max_tokens: int | None = None) -> int:
        """Begin an empty `table` with the cached blocks of `tokens`, at most `max_tokens` tokens and never the last
        one; returns the number of tokens it then holds.

        The last token is left to be run: the first new token is sampled from its row.
        """
        assert not table.blocks
        found = self._find(salt, tokens, max_tokens)
        for block in found:
            self._num_free -= self._references[block] == 0
            self._references[block] += 1
            self._kept.pop(block, None)
        table.blocks.extend(found)
        table.length = len(found) * self.block_size
        self.prefix_stats.num_looked_up_tokens += len(tokens)
        self.prefix_stats.num_found_tokens += table.length
        return table.length

    def num_shared_tokens(self, salt: str, tokens: Sequence[int], max_tokens: int | None = None) -> int:
        """How many of the tokens that `adopt` would find are in held blocks: adopting those takes no free block."""
        return sum(self._references[block] > 0 for block in self._find(salt, tokens, max_tokens)) * self.block_size

    def publish(self, table: BlockTable, salt: str, tokens: Sequence[int]) -> None:
        """Let later sequences adopt the full blocks of `table`, which holds the beginning of `tokens`; the `salt` of a
        table is always the same.
        """
        full = min(table.length, len(tokens)) // self.block_size
        table.num_published = self._index.add(salt, tokens, table.blocks[:full], table.num_published)

    def attach(
        self,
        table: BlockTable,
        salt: str,
        tokens: Sequence[int],
        num_blocks: int,
        owner: Hashable,
        states_of: StatesOf,
    ) -> None:
        """See `interface.PrefixModel`."""
        own = table.blocks[: min(table.num_published, num_blocks)]
        self._index.attach(salt, tokens, own, num_blocks, owner, states_of)

    def attached(self, salt: str, tokens: Sequence[int], owner: Hashable) -> list[object]:
        """See `interface.PrefixModel`."""
        return self._index.attached(salt, tokens, owner)

    def drop_prefixes(self) -> None:
        """Forget which block holds which text: what is published was never kept."""
        self._index.clear()
        for block in self._kept:
            self._is_empty[block] = 1
        self._kept.clear()

    def _find(self, salt: str, tokens: Sequence[int], max_tokens: int | None) -> list[int]:
        """The cached blocks of `tokens` that may be adopted."""
        most = max(0, len(tokens) - 1)
        if max_tokens is not None:
            most = min(most, max_tokens)
        return self._index.find(salt, tokens)[: most // self.block_size]

    def rollback(self, table: BlockTable, length: int) -> None:
        """Forget everything after `length` tokens and give back the blocks that are empty now."""
        assert 0 <= length <= table.length
        table.length = length
        keep = -(-length // self.block_size)
        for block in reversed(table.blocks[keep:]):  # of a kept text the end is given away first
            self._drop(block)
        del table.blocks[keep:]

    def free(self, table: BlockTable) -> None:
        """Give back every block."""
        self.rollback(table, 0)

    def check(self, tables: Sequence[BlockTable]) -> None:
        """Assert that blocks are conserved: each is free, or held exactly as often as `tables` list it."""
        held = [0] * self.num_blocks
        for table in tables:
            assert len(table.blocks) * self.block_size >= table.length
            for block in table.blocks:
                held[block] += 1
        assert held == self._references, "a block is leaked or freed twice"
        assert self.num_used + self.num_free == self.num_blocks
        assert all(not self._references[block] and block in self._index for block in self._kept)
        assert all(
            empty == (not count and block not in self._kept)
            for block, (empty, count) in enumerate(zip(self._is_empty, self._references, strict=True))
        )

    def _take(self, after: int | None, num_wanted: int = 1) -> int:
        """A free block: the next neighbour of `after` if possible, else one in the longest free run, where `num_wanted`
        shall stand together; kept blocks only for want of others.
        """
        neighbour = None if after is None or after + 1 == self.num_blocks or self._references[after + 1] else after + 1
        if self._num_free > len(self._kept):
            block = neighbour if neighbour is not None and neighbour not in self._kept else self._roomiest(num_wanted)
        else:
            block = self._kept.popitem(last=False)[0]
            self._index.remove(block)
            self.prefix_stats.num_evicted_blocks += 1
        self._references[block], self._is_empty[block] = 1, 0
        self._num_free -= 1
        return block

    def _roomiest(self, num_wanted: int) -> int:
        """Start of the pool if it is free there, else the middle of the longest free run, so that neighbours can grow.

        Only the first `_reach` blocks are looked at while their longest run has room for several times what is wanted:
        a block that was never written takes no memory yet.
        """
        assert self._num_free > len(self._kept)
        while True:
            start, length = self._longest_run()
            if self._reach == self.num_blocks or length >= _ROOM * num_wanted:
                return start if start == 0 else start + length // 2
            self._reach = min(2 * self._reach, self.num_blocks)

    def _longest_run(self) -> tuple[int, int]:
        """Start and length of the longest run of free blocks that keep no text, among the first `_reach`."""
        longest = max(_RUN.findall(self._is_empty, 0, self._reach), key=len, default=b"")
        return self._is_empty.find(longest), len(longest)

    def _drop(self, block: int) -> None:
        assert self._references[block] > 0, "freeing a free block"
        self._references[block] -= 1
        if self._references[block] == 0:
            self._num_free += 1
            if block in self._index:
                self._kept[block] = None
            else:
                self._is_empty[block] = 1


def slots_of(table: BlockTable, start: int, stop: int, block_size: int) -> range | list[int]:
    """Slots of the tokens `start` .. `stop` of a sequence: a range when they are neighbours, else a list."""
    if start >= stop:
        return range(0)
    first, last = start // block_size, (stop - 1) // block_size
    blocks = table.blocks[first : last + 1]
    if is_run(blocks):
        base = blocks[0] * block_size - first * block_size
        return range(base + start, base + stop)
    return [table.blocks[i // block_size] * block_size + i % block_size for i in range(start, stop)]


def is_run(blocks: Sequence[int]) -> bool:
    """Whether every block is the neighbour of the one before it."""
    return list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
