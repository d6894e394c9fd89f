"""Which full blocks hold which text, so that a new sequence can begin with blocks that another one filled.

A block is known by its own tokens and by the block before it, back to the beginning of the text: exact, no hash of a
text can be taken for another's. Texts of different salts (tenants) never meet, so nobody can learn from the speed of an
answer what another tenant asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_Key = tuple[
    int, tuple[int, ...]
]  # the place before (a block's number in the chain, or a salt's), and the block's tokens


@dataclass
class PrefixStats:
    """How often a prefix was found: tokens of the prompts that were looked up, and those that were there; blocks
    forgotten to make room.
    """

    num_looked_up_tokens: int = 0
    num_found_tokens: int = 0
    num_evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were there."""
        return self.num_found_tokens / self.num_looked_up_tokens if self.num_looked_up_tokens else 0.0


class PrefixIndex:
    """Chains of full blocks by their tokens. It holds no block: the allocator says which are still intact."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, int] = {}  # by salt, while anything of it is known
        self._salts: dict[int, str] = {}  # by root
        self._num_behind: dict[int, int] = {}  # blocks right behind a place
        self._blocks: dict[_Key, tuple[int, int]] = {}  # -> block, and its own number in the chain
        self._keys: dict[int, _Key] = {}  # by block
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known beginning of `tokens`, in order."""
        found: list[int] = []
        place = self._roots.get(salt)
        for piece in self._pieces(tokens):
            known = None if place is None else self._blocks.get((place, piece))
            if known is None:
                break
            found.append(known[0])
            place = known[1]
        return found

    def add(self, salt: str, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Note that `blocks` hold the full blocks of `tokens`. Where a text is known already, the block that was first
        stays.
        """
        pairs = list(zip(self._pieces(tokens), blocks, strict=False))
        if not pairs:
            return
        place = self._root(salt)
        for piece, block in pairs:
            key = (place, piece)
            known = self._blocks.get(key)
            if known is None:
                self._num_behind[place] = self._num_behind.get(place, 0) + 1  # first, so that the place stays
                if block in self._keys:  # stands for another text already: its own chain broke off before it
                    self.remove(block)
                known = self._blocks[key] = (block, next(self._numbers))
                self._keys[block] = key
            place = known[1]

    def remove(self, block: int) -> None:
        """Forget a block; those behind it cannot be found any more."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._blocks[key]
        place = key[0]
        self._num_behind[place] -= 1
        if not self._num_behind[place]:
            del self._num_behind[place]
            if place in self._salts:
                del self._roots[self._salts.pop(place)]

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            root = self._roots[salt] = next(self._numbers)
            self._salts[root] = salt
        return self._roots[salt]

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
