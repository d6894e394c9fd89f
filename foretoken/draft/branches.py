"""Trees drawn level by level from the logits of a model: how many children a node gets, then which.

Where draft tokens are deterministic (temperature 0, or the coupled rule, whose race is over once its noise is known)
any shape may depend on all of them. There "best_first" keeps the likeliest paths of all that were looked at (EAGLE-2,
Li et al. 2024, arXiv 2406.16858).

Where they are sampled, a node with n children has the n - 1 likeliest tokens of the draft's distribution and one drawn
from the rest of it (greedy+1). How many children each node gets is settled from the distributions of its level and the
nodes before it, never from what is drawn there or later, and nothing that was drawn is taken back. A level of
"best_first" then has as many nodes as that of the static tree.

Heads that predict all places of a draft in one pass name the logits of places instead (`propose_by_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core import BatchEntry, Draft
from foretoken.draft import chain
from foretoken.draft.chain import Chain, draft_numbers
from foretoken.draft.merging import RequestNodes, merge_drafts, ragged_draft
from foretoken.draft.tree import OVERLAP, TreeShape, best_nodes, max_children, sampled_shape, share_level, static_shape
from foretoken.model.interface import Segment
from foretoken.text.randomness import Purpose
from foretoken.text.sampling import draft_probs
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import draw

DEFAULT_BRANCHING = 4
# Of the chances of a race's leaders: a draft that is a little off rarely makes one win that is far behind.
_SHARPNESS = 2
_UNDRAWN = -1

Ranked = Sequence[tuple[float, int]]  # chance and token, likeliest first


class _Draw(NamedTuple):
    """A node whose token is to be drawn from row `row` of the level's distributions without the tokens `fixed`."""

    growth: Growth
    node: int
    row: int
    fixed: tuple[int, ...]


@dataclass
class Growth:
    """One request's tree while it grows: at most `budget` nodes stay, none deeper than `max_depth`.

    `frontier` are the nodes whose children come next (-1: the committed text), `ran` those whose children were looked
    at, in the order in which a model ran them. `masses` holds the mass of every node that has a sampled child.
    """

    entry: BatchEntry
    budget: int
    max_depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)  # of the chance that the path to the node is accepted
    sampled: list[bool] = field(default_factory=list)
    masses: dict[int, Tensor] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [-1])
    ran: list[int] = field(default_factory=list)
    level: int = 0
    _unused: int = 0  # nodes that the levels so far had room for and did not fill
    _places: dict[int, int] = field(default_factory=lambda: {-1: -1})  # node -> node of the static shape

    def __post_init__(self) -> None:
        spec, params = self.entry.request.spec, self.entry.request.params
        self.draws = not params.greedy and self.entry.noise is None
        self.branching: int | tuple[int, ...] = (
            spec.branching if isinstance(spec.branching, int | tuple) else DEFAULT_BRANCHING
        )
        plan = sampled_shape if self.draws else static_shape
        self.shape: TreeShape = plan(self.budget, self.branching, self.max_depth)
        self.is_static = spec.tree == "static"
        if not self.shape.parents:
            self.frontier = []

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the committed text to `node`, its own included."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def segment(self) -> Segment:
        """The frontier as rows of a model that holds the nodes of `ran` behind the text."""
        nodes = (*self.ran, *self.frontier)
        place = {-1: -1} | {node: number for number, node in enumerate(nodes)}
        parents = tuple(place[self.parents[node]] for node in nodes)
        return Segment(self.entry.request.request_id, 0, parents, len(self.frontier), len(self.ran))

    def chosen(self) -> list[int]:
        """The nodes of the draft, likeliest first."""
        chosen = best_nodes(self.parents, self.estimates, self.budget)
        assert not self.draws or len(chosen) == len(self.tokens), "what was drawn stays"
        return chosen

    def extend(self, ranked: Sequence[Ranked], first_row: int) -> list[_Draw]:
        """Give the frontier's nodes their children, from the likeliest tokens after each; what is still to be drawn.

        Row `first_row` of the level's distributions belongs to the first of the frontier.
        """
        draws: list[_Draw] = []
        num_before = len(self.tokens)
        for i, (node, count) in enumerate(zip(self.frontier, self._counts(ranked), strict=True)):
            draws += self._add_children(node, ranked[i][:count], first_row + i)
        self.ran += [node for node in self.frontier if node >= 0]
        self.level += 1
        self.frontier = self._next_frontier(num_before)
        return draws

    def _counts(self, ranked: Sequence[Ranked]) -> list[int]:
        """How many children each node of the frontier gets; fewer where fewer tokens are possible."""
        if self.is_static:
            wanted = [len(self.shape.children[1 + self._places[node]]) for node in self.frontier]
            return [min(count, len(own)) for count, own in zip(wanted, ranked, strict=True)]
        most = max_children(self.branching, self.level)
        if not self.draws:
            return [min(most, len(own)) for own in ranked]
        width = self._unused + self.shape.widths[self.level]
        reached = [1.0 if node < 0 else self.estimates[node] for node in self.frontier]
        counts = share_level([_gains(reach, own[:most]) for reach, own in zip(reached, ranked, strict=True)], width)
        self._unused = width - sum(counts)
        return counts

    def _add_children(self, node: int, ranked: Ranked, row: int) -> list[_Draw]:
        """The children of one node, likeliest first: in a static shape the first child has the largest subtree."""
        reach = 1.0 if node < 0 else self.estimates[node]
        children = [(reach * min(chance, 1.0), token) for chance, token in ranked]
        if self.draws and children:
            fixed = ranked[:-1]
            children[-1] = (reach * OVERLAP * max(0.0, 1.0 - sum(chance for chance, _ in fixed)), _UNDRAWN)
            children.sort(key=lambda child: -child[0])
        draws: list[_Draw] = []
        for place, (estimate, token) in enumerate(children):
            if token == _UNDRAWN:
                draws.append(_Draw(self, len(self.tokens), row, tuple(token for _, token in fixed)))
            if self.is_static:
                self._places[len(self.tokens)] = self.shape.children[1 + self._places[node]][place]
            self.tokens.append(token)
            self.parents.append(node)
            self.estimates.append(estimate)
            self.sampled.append(token == _UNDRAWN)
        return draws

    def _next_frontier(self, num_before: int) -> list[int]:
        new = range(num_before, len(self.tokens))
        if self.level >= self.max_depth:
            return []
        if self.is_static:
            return [node for node in new if self.shape.children[1 + self._places[node]]]
        if self.draws:
            return list(new) if self.level < len(self.shape.widths) else []
        if not max_children(self.branching, self.level):
            return []
        best = best_nodes(self.parents, self.estimates, self.budget)
        return [node for node in best if node >= num_before]  # others never come back


def extend(growths: Sequence[Growth], logits: Tensor) -> None:
    """Grow every tree by a level, from the logits `[A, V]` after the nodes of their frontiers, tree by tree."""
    owners = [(growth, node) for growth in growths for node in growth.frontier]
    params = [growth.entry.request.params for growth, _ in owners]
    logits = chain.adjusted(
        logits,
        [growth.entry for growth in growths],
        [len(growth.frontier) for growth in growths],
        lambda number: [growths[number].path(node) for node in growths[number].frontier],
    )
    probs = draft_probs(logits, params, [growth.entry.request.spec.draft_top_k for growth, _ in owners])  # [A, V]
    width = max(max_children(growth.branching, growth.level) for growth in growths)
    ranked = _ranked(owners, probs, width)
    draws: list[_Draw] = []
    row = 0
    for growth in growths:
        count = len(growth.frontier)
        draws += growth.extend(ranked[row : row + count], row)
        row += count
    if draws:
        _draw(draws, probs)


def assemble(name: str, device: torch.device, growths: Sequence[Growth]) -> Draft:
    """One ragged draft of trees; the parents of sampled tokens have their distributions."""
    tokens: list[int] = []
    nodes: list[RequestNodes] = []
    for growth in growths:
        chosen = growth.chosen()
        place = {-1: -1} | {node: i for i, node in enumerate(chosen)}
        tokens += [growth.tokens[node] for node in chosen]
        parents = [place[growth.parents[node]] for node in chosen]
        masses = [growth.masses.get(row) for row in (-1, *chosen)]
        has_run = bool(growth.shape.parents)
        nodes.append(RequestNodes(parents, masses, [growth.sampled[node] for node in chosen], has_run))
    return ragged_draft(name, to_device(tokens, device), nodes)


def _ranked(owners: Sequence[tuple[Growth, int]], probs: Tensor, width: int) -> list[Ranked]:
    """The `width` likeliest tokens after every row with their chances; none where the draft is too unsure to draft.

    Where the coupled rule will decide, the leaders of its race between the tokens of the draft's distribution, and
    chances that fall with how far they are behind.
    """
    scores = probs
    racing = [
        i
        for i, (growth, _) in enumerate(owners)
        if growth.entry.noise is not None and not growth.entry.request.params.greedy
    ]
    if racing:
        scores = probs.clone()
        noise = torch.cat([_noise(owners[i][0]) for i in racing])
        noise = to_device(noise, probs.device, probs.dtype)  # [n, V]
        rows = to_device(racing, probs.device)
        speed = probs[rows] / noise.clamp(min=torch.finfo(probs.dtype).tiny)
        lead = (speed / speed.amax(-1, keepdim=True)) ** _SHARPNESS
        scores[rows] = lead / lead.sum(-1, keepdim=True)
    best = scores.topk(min(width, probs.shape[-1]), dim=-1)
    least = to_device([growth.entry.request.spec.min_confidence for growth, _ in owners], probs.device, torch.float32)
    chances, tokens, sure = to_host(best.values.flatten(), best.indices.flatten(), probs.amax(-1) >= least)
    most = best.values.shape[-1]
    pairs = list(zip(chances, tokens, strict=True))
    return [
        [pair for pair in pairs[row * most : (row + 1) * most] if pair[0] > 0] if yes else []
        for row, yes in enumerate(sure)
    ]


def _gains(reach: float, ranked: Ranked) -> list[float]:
    """What each further child of a node adds to the chance that one of them is accepted: the first is drawn from the
    whole distribution, and every other adds a likeliest token, which is then sure of its share.
    """
    return [reach * OVERLAP, *(reach * (1 - OVERLAP) * chance for chance, _ in ranked[:-1])] if ranked else []


def _noise(growth: Growth) -> Tensor:
    assert growth.entry.noise is not None
    return growth.entry.noise.at([growth.entry.round_start + growth.level])


def _draw(draws: Sequence[_Draw], probs: Tensor) -> None:
    """Draw every waiting token from its distribution without deterministic siblings, scaled to 1: the mass."""
    rest = probs[to_device([one.row for one in draws], probs.device)]  # [n, V]
    places = [(i, token) for i, one in enumerate(draws) for token in one.fixed]
    rows, columns = to_device([[i for i, _ in places], [token for _, token in places]], probs.device)
    rest[rows, columns] = 0
    rest /= rest.sum(-1, keepdim=True)
    u = draft_numbers(Purpose.DRAFT, [one.growth.entry for one in draws], [one.node for one in draws])
    (tokens,) = to_host(draw(rest, to_device(torch.from_numpy(u), rest.device, None)))
    for one, mass, token in zip(draws, rest, tokens, strict=True):
        one.growth.tokens[one.node] = token
        one.growth.masses[one.growth.parents[one.node]] = mass


class PlaceLogits(Protocol):
    """What a head says of each place of a round's drafts."""

    def at(self, place: int, requests: Sequence[int], before: Tensor) -> Tensor:
        """Logits `[A, V]` at a place of the drafts of `requests` (numbers of entries) behind the tokens `before`
        [A, place + 1], the anchor and what was drafted.
        """

    def confidence(self, place: int, request: int) -> float:
        """The head's own estimate that its token at a place is accepted, known before it is drawn; 1 if it has none."""


def propose_by_place(
    name: str, device: torch.device, entries: Sequence[BatchEntry], most: Sequence[int], logits: PlaceLogits
) -> Draft:
    """Drafts of all `entries`, no deeper than `most` of each: trees where they are wanted and taken, else chains."""
    return propose_by_shape(
        entries,
        device,
        lambda some: _chains(name, device, {b: Chain(entries[b], most[b]) for b in some}, logits),
        lambda some: _trees(name, device, {b: Growth(entries[b], entries[b].num_draft, most[b]) for b in some}, logits),
    )


def propose_by_shape(
    entries: Sequence[BatchEntry],
    device: torch.device,
    chains: Callable[[Sequence[int]], Draft],
    trees: Callable[[Sequence[int]], Draft],
) -> Draft:
    """What `trees` drafts for those of `entries` that want trees and take them, and `chains` for the others; both are
    asked for requests by number, if there are any.
    """
    with_tree = [b for b, entry in enumerate(entries) if entry.takes_trees and entry.request.spec.tree != "chain"]
    others = [b for b in range(len(entries)) if b not in with_tree]
    parts = [(some, propose(some)) for some, propose in ((others, chains), (with_tree, trees)) if some]
    return merge_drafts(len(entries), parts, device)


def _chains(name: str, device: torch.device, chains: dict[int, Chain], logits: PlaceLogits) -> Draft:
    """Chains of requests, by number, drawn place by place."""
    anchors = {b: to_device(one.entry.pending[-1:], device)[0] for b, one in chains.items() if one.grows}
    place = 0
    while True:
        for b, one in chains.items():
            one.stopped |= one.grows and _is_unsure(one.entry, logits.confidence(place, b))
        growing = [b for b, one in chains.items() if one.grows]
        if not growing:
            break
        before = torch.stack([torch.stack((anchors[b], *chains[b].tokens)) for b in growing])  # [A, place + 1]
        chain.extend([chains[b] for b in growing], logits.at(place, growing, before))
        place += 1
    return chain.assemble(name, device, list(chains.values()))


def _trees(name: str, device: torch.device, growths: dict[int, Growth], logits: PlaceLogits) -> Draft:
    """Trees of requests, by number, drawn level by level."""
    place = 0
    while True:
        for b, growth in growths.items():
            if growth.frontier and _is_unsure(growth.entry, logits.confidence(place, b)):
                growth.frontier = []
        growing = {b: growth for b, growth in growths.items() if growth.frontier}
        if not growing:
            break
        owners = [b for b, growth in growing.items() for _ in growth.frontier]
        before = [
            [growth.entry.pending[-1], *growth.path(node)] for growth in growing.values() for node in growth.frontier
        ]
        extend(list(growing.values()), logits.at(place, owners, to_device(before, device)))
        place += 1
    return assemble(name, device, list(growths.values()))


def _is_unsure(entry: BatchEntry, confidence: float) -> bool:
    """Whether nothing is to be drafted at a place, settled before anything is drawn there."""
    return confidence < entry.request.spec.min_confidence
