"""Which full blocks hold which text, so that a new sequence can begin with blocks that another one filled.

A block is identified by its own tokens and by the block before it, back to the beginning of the text. Tokens are
compared, not hashes, so two texts are never confused. Texts of different salts (tenants) share nothing, so the latency
of an answer reveals nothing about another tenant's prompts.

States that drafters attach to a block (`attach`) are opaque here. They live as long as the block's entry: the entry is
removed when the block is evicted or written again, and its states go with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

# The place before (a block's number in the chain, or a salt's), and the block's tokens.
_Key = tuple[int, tuple[int, ...]]
StatesOf = Callable[[int, int], Sequence[object]]  # of the blocks from one number to another, one each

_PIECE = 256  # of two texts that are compared at once


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the longest common beginning."""
    start, stop = 0, min(len(one), len(other))
    while start < stop and one[start : start + _PIECE] == other[start : start + _PIECE]:  # without a loop in Python
        start += _PIECE
    return next((place for place in range(start, stop) if one[place] != other[place]), stop)


@dataclass
class PrefixStats:
    """Tokens of prompts that were looked up, and those that were there; blocks forgotten to make room."""

    num_looked_up_tokens: int = 0
    num_found_tokens: int = 0
    num_evicted_blocks: int = 0


class PrefixIndex:
    """Chains of full blocks by their tokens. It holds no reference to a block: the allocator removes entries."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, int] = {}  # by salt, while anything of it is known
        self._salts: dict[int, str] = {}  # by root
        self._num_behind: dict[int, int] = {}  # blocks right behind a place
        self._blocks: dict[_Key, tuple[int, int]] = {}  # -> block, and its own number in the chain
        self._keys: dict[int, _Key] = {}  # by block
        self._attached: dict[int, dict[Hashable, object]] = {}  # by block, then by owner; only blocks in `_keys`
        self._numbers = itertools.count()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, salt: str, tokens: Sequence[int], own: Sequence[int] = (), most: int | None = None) -> list[int]:
        """The blocks that hold the longest known beginning of `tokens`, in order: those behind the blocks `own`, which
        stand for their text themselves, `most` at most.
        """
        found: list[int] = []
        place = self._blocks[self._keys[own[-1]]][1] if own else self._roots.get(salt)
        for piece in itertools.islice(self._pieces(tokens, len(own)), most):
            known = None if place is None else self._blocks.get((place, piece))
            if known is None:
                break
            found.append(known[0])
            place = known[1]
        return found

    def add(self, salt: str, tokens: Sequence[int], blocks: Sequence[int], num_own: int = 0) -> int:
        """Note that `blocks` hold the full blocks of `tokens`. Of a text that is known the first block stays.

        Returns how many blocks from the first on stand for their text themselves. The caller, who must hold `blocks`,
        gives that number as `num_own` the next time: those are not looked at again.
        """
        num_own = min(num_own, len(blocks))
        if num_own and blocks[num_own - 1] not in self._keys:
            num_own = 0  # the text was written anew, or all texts were forgotten
        if num_own == len(blocks):
            return num_own
        place = self._blocks[self._keys[blocks[num_own - 1]]][1] if num_own else self._root(salt)
        pairs = zip(blocks[num_own:], self._pieces(tokens, num_own), strict=False)
        for number, (block, piece) in enumerate(pairs, num_own):
            key = (place, piece)
            known = self._blocks.get(key)
            if known is None:
                self._num_behind[place] = self._num_behind.get(place, 0) + 1  # first, so that the place stays
                if block in self._keys:  # stands for another text already: its own chain broke off before it
                    self.remove(block)
                known = self._blocks[key] = (block, next(self._numbers))
                self._keys[block] = key
            num_own += num_own == number and known[0] == block
            place = known[1]
        return num_own

    def attach(
        self,
        salt: str,
        tokens: Sequence[int],
        own: Sequence[int],
        num_blocks: int,
        owner: Hashable,
        states_of: StatesOf,
    ) -> None:
        """See `interface.PrefixModel`; the first blocks of `tokens`, `own`, stand for their text themselves.

        States are attached from the first block on, so that behind a block without any there are none.
        """
        blocks = [*own, *self.find(salt, tokens, own, num_blocks - len(own))]
        first = len(own)
        while first < len(blocks) and self._has(blocks[first], owner):
            first += 1
        while first and not self._has(blocks[first - 1], owner):
            first -= 1
        if first < len(blocks):
            for block, state in zip(blocks[first:], states_of(first, len(blocks)), strict=False):
                self._attached.setdefault(block, {})[owner] = state

    def attached(self, salt: str, tokens: Sequence[int], owner: Hashable) -> list[object]:
        """The states of `owner` at the leading blocks of `tokens`, up to the first block without."""
        found: list[object] = []
        for block in self.find(salt, tokens):
            states = self._attached.get(block, {})
            if owner not in states:
                break
            found.append(states[owner])
        return found

    def _has(self, block: int, owner: Hashable) -> bool:
        """Whether states of `owner` are attached to a block."""
        return owner in self._attached.get(block, ())

    def remove(self, block: int) -> None:
        """Remove a block and the states attached to it; blocks that follow it are no longer found."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        self._attached.pop(block, None)
        del self._blocks[key]
        place = key[0]
        self._num_behind[place] -= 1
        if not self._num_behind[place]:
            del self._num_behind[place]
            if place in self._salts:
                del self._roots[self._salts.pop(place)]

    def clear(self) -> None:
        """Forget every text, with the states attached to it."""
        for block in tuple(self._keys):
            self.remove(block)

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            root = self._roots[salt] = next(self._numbers)
            self._salts[root] = salt
        return self._roots[salt]

    def _pieces(self, tokens: Sequence[int], first: int = 0) -> Iterator[tuple[int, ...]]:
        """The full blocks of a text from number `first` on, made as they are asked for."""
        size = self.block_size
        return (tuple(tokens[start : start + size]) for start in range(first * size, len(tokens) - size + 1, size))
