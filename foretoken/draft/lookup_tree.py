"""From places that agree with a text's end to a draft: how likely each continuation is, and which of them to draft."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from foretoken.core import BatchEntry, Draft
from foretoken.draft.base import Drafter
from foretoken.draft.matches import NO_TOKEN


@dataclass(frozen=True)
class LookupTree:
    """Draft tokens as a tree: `tokens`, `parents` (-1: the text's end), and the `chances` of their paths."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()

    @property
    def score(self) -> float:
        """The expected number of draft tokens that will be accepted."""
        return sum(self.chances)

    def first(self, count: int) -> LookupTree:
        """The first `count` draft tokens: parents come before their children."""
        return (
            self
            if count >= len(self.tokens)
            else LookupTree(self.tokens[:count], self.parents[:count], self.chances[:count])
        )


EMPTY = LookupTree()


@runtime_checkable
class Lookup(Drafter, Protocol):
    """A drafter that asks no model: its drafts are deterministic, and looking changes nothing in it."""

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """Draft at most `entry.num_draft` tokens behind the committed text and `ahead`, tokens not yet committed."""


def grow_tree(
    following: Sequence[Sequence[int]], budget: int, branching: int, doubt: float, least: float
) -> LookupTree:
    """The `budget` likeliest nodes over the continuations `following` [m][d] of equally good places, latest first.

    A node's estimate is its parent's times the share of the parent's places that say it, where `doubt` places more
    might have said something else. A node has at most `branching` children; what is less likely than `least` is left
    out. Of tokens said equally often the one at the latest place comes first. Best-first growth is optimal here,
    because no child is likelier than its parent.
    """
    if len(following) == 1:
        return _grow_chain(following[0], budget, doubt, least)
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    serial = 0
    heap: list[tuple[float, int, int, int, list[int], int]] = []

    def push(rows: list[int], parent: int, depth: int, estimate: float) -> None:
        nonlocal serial
        if depth >= len(following[0]):
            return
        said: dict[int, list[int]] = {}  # by token the places that say it, latest first
        for row in rows:
            said.setdefault(following[row][depth], []).append(row)
        said.pop(NO_TOKEN, None)
        ranked = sorted(said.items(), key=lambda item: -len(item[1]))[:branching] if len(said) > 1 else said.items()
        for token, own in ranked:
            chance = estimate * len(own) / (len(rows) + doubt)
            if chance >= least:
                heapq.heappush(heap, (-chance, serial, parent, token, own, depth))
                serial += 1

    if budget > 0 and following:
        push(list(range(len(following))), -1, 0, 1.0)
    while heap and len(tokens) < budget:
        negative, _, parent, token, rows, depth = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        chances.append(-negative)
        push(rows, len(tokens) - 1, depth + 1, -negative)
    return LookupTree(tuple(tokens), tuple(parents), tuple(chances))


def _grow_chain(following: Sequence[int], budget: int, doubt: float, least: float) -> LookupTree:
    """`grow_tree` over one place."""
    tokens: list[int] = []
    chances: list[float] = []
    chance = 1.0
    for token in following[: max(0, budget)]:
        chance = chance / (1 + doubt)
        if token == NO_TOKEN or chance < least:
            break
        tokens.append(token)
        chances.append(chance)
    return LookupTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(chances))


def assemble(name: str, trees: Sequence[LookupTree]) -> Draft:
    """One ragged draft of deterministic tokens, a tree per request."""
    offsets = [0]
    for tree in trees:
        offsets.append(offsets[-1] + len(tree.tokens))
    return Draft(
        tokens=torch.tensor([token for tree in trees for token in tree.tokens], dtype=torch.int64),
        parents=tuple(parent for tree in trees for parent in tree.parents),
        offsets=tuple(offsets),
        drafters=tuple(name if tree.tokens else None for tree in trees),
    )
