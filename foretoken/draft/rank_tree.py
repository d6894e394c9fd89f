"""Trees of ranks: which predictions of which heads are worth a node, from how often each rank was right (Medusa, Cai et
al. 2401.10774, section 2.3.3).

Whether the prediction of rank r at a place is right does not depend on the text before, so the best tree of a size is
made of the tuples of ranks with the largest products. The chances are counted for each request by itself, from the
tokens that its rounds emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.draft.tree import TreeNode, grow_best_first

NUM_RANKS = 10  # predictions of a head that are looked at, as in Medusa's own trees
_FIRST_CHANCE, _FALL_PER_PLACE = 0.6, 0.85  # before anything was counted: of rank 0 at place 0, and from place to place
_PRIOR_WEIGHT = 8.0  # rounds that the typical chances count as


class RankChances:
    """How often the prediction of each rank was right at each place of one request's drafts."""

    def __init__(self, num_places: int, num_ranks: int) -> None:
        self._right = [
            [_PRIOR_WEIGHT * _FIRST_CHANCE * _FALL_PER_PLACE**place / (1 + rank) ** 2 for rank in range(num_ranks)]
            for place in range(num_places)
        ]
        self._seen = [_PRIOR_WEIGHT] * num_places

    def count(self, place: int, rank: int | None) -> None:
        """At `place` the prediction of `rank` was right; None: none of them."""
        self._seen[place] += 1
        if rank is not None:
            self._right[place][rank] += 1

    def at(self, place: int) -> list[tuple[float, int]]:
        """Chance and rank at `place`, likeliest first."""
        chances = [(right / self._seen[place], rank) for rank, right in enumerate(self._right[place])]
        return sorted(chances, key=lambda pair: (-pair[0], pair[1]))


def best_ranks(chances: RankChances, budget: int, num_places: int) -> list[TreeNode]:
    """The `budget` tuples of ranks with the largest products, no longer than `num_places`; `token` is the rank."""
    depths: list[int] = []

    def children(node: TreeNode) -> Sequence[tuple[float, int]]:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
        return chances.at(depths[-1]) if depths[-1] < num_places else ()

    return grow_best_first(chances.at(0) if num_places else (), children, budget)


@dataclass
class RankTree:
    """One request's tree while its ranks are filled with tokens, level by level.

    `ranks` hold a parent before its children; `tops` are the likeliest tokens behind a node (-1: the anchor) whose
    children were filled.
    """

    ranks: list[TreeNode]
    tokens: list[int] = field(init=False)
    tops: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = [-1] * len(self.ranks)
        self._children: dict[int, list[int]] = {}
        for number, node in enumerate(self.ranks):
            self._children.setdefault(node.parent, []).append(number)

    def inner(self, nodes: Sequence[int]) -> list[int]:
        """Those of `nodes` that have children."""
        return [node for node in nodes if node in self._children]

    def fill(self, node: int, tops: list[int]) -> list[int]:
        """Give the children of a node their tokens; the children."""
        self.tops[node] = tops
        for child in self._children[node]:
            self.tokens[child] = tops[self.ranks[child].token]
        return self._children[node]

    def path(self, node: int) -> list[int]:
        """Tokens from the anchor to `node`, its own included."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.ranks[node].parent
        return tokens[::-1]

    def count(self, emitted: Sequence[int], chances: RankChances) -> None:
        """Count which ranks were right along the `emitted` tokens, as far as the tree was filled there."""
        node = -1
        for place, token in enumerate(emitted):
            tops = self.tops.get(node)
            if tops is None:
                return
            chances.count(place, tops.index(token) if token in tops else None)
            known = [child for child in self._children[node] if self.tokens[child] == token]
            if not known:
                return
            node = known[0]
