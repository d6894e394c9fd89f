"""From places that agree with a text's end to a draft: how likely each continuation is, and which of them to draft."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Verdict
from foretoken.draft.base import Drafter, Factory, Feedback
from foretoken.draft.merging import RequestNodes, ragged_draft
from foretoken.draft.tree import TreeNode
from foretoken.transfer import to_device

# ---- where the last words of a text stood before: the index behind every lookup drafter
#
# Tokens that stand together lead to their latest place, and every place to the one before it. How far a place's past
# agrees with the text's end, and what came after it, is read off the text itself. Adding a token costs two dictionary
# entries at most, the cost of a query does not depend on the length of the text.

# Neighbouring tokens that lead to places: two are the least that is not noise; six find the place that agrees longest
# where the pair alone has stood too often.
_KEY_SIZES = (6, 2)
MAX_PLACES = 48  # latest places that are looked at
MATCH_LIMIT = 32  # how far back agreement is measured
NO_TOKEN = -1  # stands between texts of a store; never matches


@dataclass(frozen=True)
class Matches:
    """Places that agree with a text's end, latest first: `lengths` [m] of the agreement, `following` [m][d] tokens."""

    lengths: list[int]
    following: list[list[int]]

    def __len__(self) -> int:
        return len(self.lengths)

    def agreeing(self, least: int) -> list[list[int]]:
        """What follows the places that agree at least so far."""
        return [tokens for length, tokens in zip(self.lengths, self.following, strict=True) if length >= least]


class MatchIndex:
    """A growing text and, for tokens that stand together, every place where something followed them."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._text = array("i")
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _KEY_SIZES)  # by hash of the tokens
        # Of each place the one before it with the same tokens, -1 if none.
        self._previous = tuple(array("i") for _ in _KEY_SIZES)
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A place is indexed with the token that stands there, so the text's end never matches."""
        start = len(self._text)
        self._text.extend(array("i", tokens))
        stop = len(self._text)
        for size, latest, previous in zip(_KEY_SIZES, self._latest, self._previous, strict=True):
            known = self._text[max(0, start - size) : stop].tolist()
            base = stop - len(known)
            for place in range(start, stop):
                at = place - base
                window = tuple(known[at - size : at + 1]) if at >= size else ()
                if not window or NO_TOKEN in window:
                    previous.append(-1)
                    continue
                key = hash(window[:-1])
                previous.append(latest.get(key, -1))
                latest[key] = place

    def end(self, count: int = MATCH_LIMIT) -> list[int]:
        """The last `count` tokens."""
        return self._text[max(0, len(self._text) - count) :].tolist()

    def matches(self, end: Sequence[int], depth: int, most: int = MAX_PLACES) -> Matches | None:
        """Places that agree with the last two tokens of `end` or more, and `depth` tokens after each, or None.

        The `most` latest that agree with six tokens, filled up with the latest that agree with two. Where the text ends
        a place copies itself on (a text that repeats).
        """
        places = self._places(end, most)
        if not places:
            return None
        past = array("i", end[-MATCH_LIMIT:])[::-1]
        agreeing = [(place, length) for place in places if (length := self._agreement(place, past)) >= _KEY_SIZES[-1]]
        if not agreeing:
            return None  # hashes may collide
        return Matches([length for _, length in agreeing], [self._following(place, depth) for place, _ in agreeing])

    def _agreement(self, place: int, past: array[int]) -> int:
        """How many tokens before `place` are those of `past`, both latest first."""
        own = self._text[max(0, place - len(past)) : place][::-1]
        if own == past:
            return len(past)
        for length, token in enumerate(own):
            if token != past[length]:
                return length
        return len(own)

    def _following(self, place: int, depth: int) -> list[int]:
        """The `depth` tokens from `place` on, in turn again where the text ends."""
        found = self._text[place : place + depth].tolist()
        while len(found) < depth:
            found += found[: depth - len(found)]
        return found

    def _places(self, end: Sequence[int], most: int) -> list[int]:
        """Latest first. What agrees with six tokens agrees with two: where two stood nowhere, nothing did."""
        found: set[int] = set()
        if len(end) < _KEY_SIZES[-1] or hash(tuple(end[-_KEY_SIZES[-1] :])) not in self._latest[-1]:
            return []
        for size, latest, previous in zip(_KEY_SIZES, self._latest, self._previous, strict=True):
            place = latest.get(hash(tuple(end[-size:])), -1) if len(end) >= size else -1
            while place >= 0 and len(found) < most:
                found.add(place)
                place = previous[place]
        return sorted(found, reverse=True)


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

    @classmethod
    def of(cls, nodes: Sequence[TreeNode]) -> LookupTree:
        """The tree of these nodes."""
        return cls(*zip(*((node.token, node.parent, node.estimate) for node in nodes), strict=True))

    def first(self, count: int) -> LookupTree:
        """The first `count` draft tokens: parents come before their children."""
        if count >= len(self.tokens):
            return self
        return LookupTree(self.tokens[:count], self.parents[:count], self.chances[:count])

    def part(self, nodes: Sequence[int]) -> LookupTree:
        """Only the draft tokens `nodes`, in this order, each behind its parent."""
        place = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        return LookupTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            tuple(self.chances[node] for node in nodes),
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


Said = Callable[[Sequence[int]], tuple[int, float] | None]  # the likeliest token behind a text, and its chance


def continued(tree: LookupTree, said: Said, end: Sequence[int], budget: int, least: float) -> LookupTree:
    """`tree`, a draft behind a text that ends with `end`, and behind each of its leaves a chain of what another source
    has `said`: it is asked only where the tree says nothing.

    The `budget` likeliest nodes, none less likely than `least`.
    """
    nodes = [TreeNode(*node) for node in zip(tree.tokens, tree.parents, tree.chances, strict=True)]
    for leaf in sorted(set(range(len(nodes))) - set(tree.parents)) or [-1]:
        path: list[int] = []
        node, chance, place = leaf, tree.chances[leaf] if nodes else 1.0, leaf
        while node >= 0:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        text = [*end, *reversed(path)]
        for _ in range(budget):
            found = said(text)
            if found is None or (chance := chance * found[1]) < least:
                break
            nodes.append(TreeNode(found[0], place, chance))
            place = len(nodes) - 1
            text.append(found[0])
    if len(nodes) == len(tree.tokens):
        return tree
    likeliest = sorted(range(len(nodes)), key=lambda node: -nodes[node].estimate)[:budget]
    return LookupTree.of(nodes).part(likeliest)


class GrowingText(Protocol):
    """What a lookup keeps of a request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer."""


_Text = TypeVar("_Text", bound=GrowingText)


class LookupDrafter(ABC):
    """What all lookups answer alike."""

    name: str

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:  # noqa: ARG003
        """See `base.Factory`."""
        return cls()

    @abstractmethod
    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """See `Lookup`."""

    def propose(self, batch: Batch) -> Draft:
        """What `look_up` gives for each request."""
        return assemble(self.name, [self.look_up(entry) for entry in batch.decoding])

    def reset(self) -> None:  # noqa: B027 - not abstract: most keep nothing
        """See `base.Resets`: nothing outlives a request."""


class TextLookup(LookupDrafter, Generic[_Text]):
    """What lookups that keep one growing text of each request answer alike."""

    keeps_answers = False  # see `base.FollowsText`

    def __init__(self) -> None:
        self._indexes: dict[int, _Text] = {}

    @property
    def only_follows(self) -> bool:
        """See `base.FollowsText`: unless a subclass does more in `commit`."""
        return type(self).commit is TextLookup.commit

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Append what was emitted."""
        for b, entry in enumerate(batch.decoding):
            self._indexes[entry.request.request_id].extend(verdict.emitted(b))

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`."""
        self._indexes[request_id].extend(tokens)

    def finish(self, request_id: int) -> None:
        """Drop what is kept of the request."""
        del self._indexes[request_id]


def assemble(name: str, trees: Sequence[LookupTree]) -> Draft:
    """One ragged draft of deterministic tokens, a tree per request."""
    tokens = [token for tree in trees for token in tree.tokens]
    draft = ragged_draft(name, to_device(tokens, "cpu"), [RequestNodes(tree.parents) for tree in trees])
    return draft.with_host_tokens(tokens)
