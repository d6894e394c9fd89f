"""Shapes of draft trees, and which draft tokens are worth a node: pure functions, no model.

A tree that holds with its estimates yields 1 + their sum tokens in expectation, so the best tree of a size is made of
the likeliest paths. No path is likelier than its beginning: growing best first finds them, and they are closed under
ancestors.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TreeNode(NamedTuple):
    """A deterministic draft token: `parent` is an earlier place in the list that holds it (-1: the committed text).

    `estimate` is the chance that the whole path to it will be accepted, `drafter` the name of the one that drafted it.
    """

    token: int
    parent: int
    estimate: float
    drafter: str | None = None


# Chance and token of each child of a node, likeliest first.
Children = Callable[[TreeNode], Sequence[tuple[float, int]]]

# Chance that a token drawn from a draft's distribution, or from a part of it, is accepted where the target's token is
# in that part.
OVERLAP = 0.7
_MAX_PLANNED = 64  # nodes of a tree that is planned node by node
_MAX_SAMPLED_CHILDREN = 4
_FIRST_CHANCE = 0.6  # that a draft's likeliest token is accepted; rank r (from 0) has 1 / (1 + r)^2 of it


def grow_best_first(first: Sequence[tuple[float, int]], children: Children, budget: int) -> list[TreeNode]:
    """The `budget` likeliest paths, likeliest first: `first` are chance and token after the committed text, `children`
    those after a node, asked for in the order of the result.

    A chance is that of the child once its parent stands, and at most 1. Of equal ones the one found first comes first,
    so that a child of chance 1 never overtakes its parent. The heap holds the best unused sibling and the first child
    of every node (DDTree, `liranringel/ddtree`): O(budget log budget).
    """
    nodes: list[TreeNode] = []
    # (-estimate, age, parent, before, siblings, place)
    heap: list[tuple[float, int, int, float, Sequence[tuple[float, int]], int]] = []
    age = 0

    def push(parent: int, before: float, siblings: Sequence[tuple[float, int]], place: int) -> None:
        nonlocal age
        if place < len(siblings):
            heapq.heappush(heap, (-before * siblings[place][0], age, parent, before, siblings, place))
            age += 1

    push(-1, 1.0, first, 0)
    while heap and len(nodes) < budget:
        negative, _, parent, before, siblings, place = heapq.heappop(heap)
        token = siblings[place][1]
        nodes.append(TreeNode(token, parent, -negative))
        push(parent, before, siblings, place + 1)
        push(len(nodes) - 1, -negative, children(nodes[-1]), 0)
    return nodes


def best_nodes(parents: Sequence[int], estimates: Sequence[float], budget: int) -> list[int]:
    """The `budget` nodes of the highest estimate, likeliest first; ties go to the lower index.

    Closed under ancestors, parents before children, if no estimate is above its parent's and no index below: of equals
    the parent then has the lower one. A smaller budget gives the beginning of what a larger one gives.
    """
    chosen = sorted(range(len(parents)), key=lambda node: (-estimates[node], node))[:budget]
    kept = {-1, *chosen}
    assert all(parents[node] in kept for node in chosen), "a child is likelier than its parent"
    return chosen


def merge_trees(trees: Sequence[Sequence[TreeNode]], budget: int) -> list[TreeNode]:
    """One tree of the `budget` likeliest nodes of several deterministic trees, likeliest first.

    A path that several trees hold is one node; its estimate is the highest that any of them gives it, and that tree is
    its provenance (the earlier tree on a tie). An estimate above its parent's in the same tree counts as the parent's:
    a path is never likelier than its beginning. Exact only for tokens that were not sampled: which of them stay may
    depend on all of them.
    """
    union: list[TreeNode] = []
    places: dict[tuple[int, int], int] = {}  # (place of the parent, token) -> place
    for tree in trees:
        own: list[int] = []  # place of each of the tree's nodes
        chance: list[float] = []
        for node in tree:
            parent = -1 if node.parent < 0 else own[node.parent]
            chance.append(min(node.estimate, 1.0 if node.parent < 0 else chance[node.parent]))
            place = places.setdefault((parent, node.token), len(union))
            if place == len(union):
                union.append(TreeNode(node.token, parent, chance[-1], node.drafter))
            elif chance[-1] > union[place].estimate:
                union[place] = TreeNode(node.token, parent, chance[-1], node.drafter)
            own.append(place)
    chosen = best_nodes([node.parent for node in union], [node.estimate for node in union], budget)
    new = {-1: -1} | {old: place for place, old in enumerate(chosen)}
    return [union[old]._replace(parent=new[union[old].parent]) for old in chosen]


@dataclass(frozen=True)
class TreeShape:
    """A tree without tokens, level by level: `parents` (-1 = the committed text) and `children[1 + node]` in the order
    of their ranks.

    `children[0]` are those of the committed text.
    """

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]  # nodes on each level


def max_children(branching: int | Sequence[int], depth: int) -> int:
    """How many children a node at depth `depth` may have: one limit for all depths, or one each and none below."""
    if isinstance(branching, int):
        return branching
    return branching[depth] if depth < len(branching) else 0


@functools.lru_cache(maxsize=256)
def static_shape(budget: int, branching: int | tuple[int, ...], max_depth: int) -> TreeShape:
    """The best tree of `budget` nodes when the prediction of rank r is right with the same chance everywhere, whatever
    stands before it.

    Chances that do not depend on the text make the best of all trees a fixed one; the dynamic programme of Sequoia
    (Chen et al. 2024, arXiv 2402.12374) finds the same. No node is deeper than `max_depth` or has more children than
    `branching` allows.
    """
    depths: list[int] = []

    def ranks(depth: int) -> list[tuple[float, int]]:
        count = max_children(branching, depth) if depth < max_depth else 0
        return [(_FIRST_CHANCE / (1 + rank) ** 2, rank) for rank in range(count)]

    def children(node: TreeNode) -> list[tuple[float, int]]:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
        return ranks(depths[-1])

    return _by_levels([node.parent for node in grow_best_first(ranks(0), children, budget)])


@functools.lru_cache(maxsize=256)
def sampled_shape(budget: int, branching: int | tuple[int, ...], max_depth: int) -> TreeShape:
    """The best tree of `budget` nodes when each node's last child is drawn from the rest of the distribution.

    Another child takes chance from its siblings here, so that splitting a path costs what would have stood on it. The
    dynamic programme of Sequoia (Chen et al. 2024, arXiv 2402.12374), over typical chances for each number of children;
    a tree of more than 64 nodes has the shape of a deterministic one.
    """
    if budget > _MAX_PLANNED:
        return static_shape(budget, branching, max_depth)

    @functools.cache
    def below(budget: int, depth: int) -> tuple[float, tuple[int, ...]]:
        """The value of `budget` nodes below a node at `depth`, and how many each child gets, itself included."""
        most = min(budget, max_children(branching, depth), _MAX_SAMPLED_CHILDREN) if depth < max_depth else 0
        return max((split(budget, depth, count, 0) for count in range(1, most + 1)), default=(0.0, ()))

    @functools.cache
    def split(budget: int, depth: int, count: int, place: int) -> tuple[float, tuple[int, ...]]:
        """The same for the children from `place` on when there are `count` of them."""
        if place == count:
            return 0.0, ()
        chance, later = sampled_chances(count)[place], count - place - 1
        best: tuple[float, tuple[int, ...]] = (-1.0, ())
        for own in range(1, budget - later + 1):
            rest = split(budget - own, depth, count, place + 1)
            best = max(best, (chance * (1 + below(own - 1, depth + 1)[0]) + rest[0], (own, *rest[1])))
        return best

    parents: list[int] = []
    waiting = [(-1, budget, 0)]
    while waiting:
        node, nodes, depth = waiting.pop(0)
        for own in below(nodes, depth)[1]:
            waiting.append((len(parents), own - 1, depth + 1))
            parents.append(node)
    return _by_levels(parents)


def sampled_chances(count: int) -> tuple[float, ...]:
    """Typical chances of `count` children, largest first: the draft's likeliest tokens, and one drawn from the rest."""
    fixed = [_FIRST_CHANCE / (1 + rank) ** 2 for rank in range(count - 1)]
    return tuple(sorted((*fixed, OVERLAP * (1 - sum(fixed))), reverse=True))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 1 below the committed text; parents stand before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _by_levels(parents: Sequence[int]) -> TreeShape:
    """A tree given by parents that stand before their children, level by level."""
    depths = depths_of(parents)
    order = sorted(range(len(parents)), key=lambda node: (depths[node], node))
    place = {-1: -1} | {node: i for i, node in enumerate(order)}
    by_row: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for i, node in enumerate(order):
        by_row[1 + place[parents[node]]].append(i)
    widths = [depths.count(depth) for depth in range(1, max(depths, default=0) + 1)]
    return TreeShape(tuple(place[parents[node]] for node in order), tuple(map(tuple, by_row)), tuple(widths))


def share_level(values: Sequence[Sequence[float]], width: int) -> list[int]:
    """How many children each node of a level gets so that the `width` largest `values` are chosen: values[node] fall
    from left to right.

    Ties go to the earlier node.
    """
    slots = sorted(((-value, node) for node, own in enumerate(values) for value in own))[:width]
    counts = [0] * len(values)
    for _, node in slots:
        counts[node] += 1
    return counts
