"""Shapes of trees of guesses, and which guesses are worth a node: pure functions, no model.

A tree that holds with its estimates yields 1 + their sum tokens in expectation, so the best tree of a size is made of the likeliest
paths. No path is likelier than its beginning: growing best first finds them, and they are closed under ancestors.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple


class TreeNode(NamedTuple):
    """A deterministic guess: `parent` is its place in the list that holds it (-1: the committed text), before its own.

    `estimate` is the chance that the whole path to it will be accepted, `author` the drafter that guessed it.
    """

    token: int
    parent: int
    estimate: float
    author: str | None = None


Children = Callable[[int, int], Sequence[tuple[float, int]]]  # (node, its token) -> chance and token of each child, likeliest first


def grow_best_first(first: Sequence[tuple[float, int]], children: Children, budget: int, least: float = 0.0) -> list[TreeNode]:
    """The `budget` likeliest paths, likeliest first: `first` are chance and token after the committed text, `children` those after a node.

    A chance is that of the child once its parent stands, and at most 1. Paths less likely than `least` are left out. Of equal ones the
    one found first comes first, so that a child of chance 1 never overtakes its parent. The heap holds the best unused sibling and
    the first child of every node (DDTree, `liranringel/ddtree`): O(budget log budget).
    """
    nodes: list[TreeNode] = []
    heap: list[tuple[float, int, int, float, Sequence[tuple[float, int]], int]] = []  # (-estimate, age, parent, before, siblings, place)
    age = 0

    def push(parent: int, before: float, siblings: Sequence[tuple[float, int]], place: int) -> None:
        nonlocal age
        if place < len(siblings) and before * siblings[place][0] >= least:
            heapq.heappush(heap, (-before * siblings[place][0], age, parent, before, siblings, place))
            age += 1

    push(-1, 1.0, first, 0)
    while heap and len(nodes) < budget:
        negative, _, parent, before, siblings, place = heapq.heappop(heap)
        token = siblings[place][1]
        nodes.append(TreeNode(token, parent, -negative))
        push(parent, before, siblings, place + 1)
        if len(nodes) < budget:
            push(len(nodes) - 1, -negative, children(len(nodes) - 1, token), 0)
    return nodes


def best_nodes(parents: Sequence[int], estimates: Sequence[float], budget: int) -> list[int]:
    """The `budget` nodes of the highest estimate, in the order of their index; ties go to the lower index.

    Closed under ancestors if no estimate is above its parent's and parents come first: of equals the parent then has the lower index.
    """
    chosen = sorted(sorted(range(len(parents)), key=lambda node: (-estimates[node], node))[:budget])
    kept = {-1, *chosen}
    assert all(parents[node] in kept for node in chosen), "a child is likelier than its parent"
    return chosen


def merge_trees(trees: Sequence[Sequence[TreeNode]], budget: int) -> list[TreeNode]:
    """One tree of the `budget` likeliest guesses of several deterministic trees, parents first.

    A path that several trees hold is one node; its estimate is the highest that any of them gives it, and that tree is its author (the
    earlier tree on a tie). An estimate above its parent's in the same tree counts as the parent's: a path is never likelier than its
    beginning. Lawful for guesses that were not sampled only: which of them stay may depend on all of them.
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
                union.append(TreeNode(node.token, parent, chance[-1], node.author))
            elif chance[-1] > union[place].estimate:
                union[place] = TreeNode(node.token, parent, chance[-1], node.author)
            own.append(place)
    chosen = best_nodes([node.parent for node in union], [node.estimate for node in union], budget)
    new = {-1: -1} | {old: place for place, old in enumerate(chosen)}
    return [union[old]._replace(parent=new[union[old].parent]) for old in chosen]
