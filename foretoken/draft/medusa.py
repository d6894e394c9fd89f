"""Medusa heads over the target's last hidden state (`heads.medusa`; Cai et al. 2401.10774, Hydra: 2402.05109).

Nothing is kept of a request but the newest state. A chain is drawn from the heads' distributions; "best_first" grows a
tree over the products of their chances; "static" has Medusa's sparse tree of rank tuples, whose shape follows from how
often each head's rank was right for this request (`rank_tree`). Its tokens are the heads' likeliest tokens, whatever
the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback, HiddenRows
from foretoken.draft.branches import propose_by_place
from foretoken.draft.head_drafter import HeadDrafter, twin_target
from foretoken.draft.lookup_tree import LookupTree, assemble
from foretoken.draft.merging import merge_drafts
from foretoken.draft.open_head import open_head
from foretoken.draft.tree import TreeNode, grow_best_first
from foretoken.heads.graphs import medusa_graphs
from foretoken.heads.medusa import MedusaHead
from foretoken.model.interface import LanguageModel, SharesWeights
from foretoken.transfer import to_device, to_host

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


@dataclass
class _Newest:
    """The newest state of a request, in front of the target's final norm, and what its tree's shape follows from."""

    chances: RankChances
    state: Tensor | None = None  # [1, D]
    stop: int = 0  # position behind it
    tree: RankTree | None = None  # of the round that is not committed


@dataclass(frozen=True)
class _HeadPredictions:
    """What the heads say of all places (`by_place.PlaceLogits`); request b's state is row `row[b]`."""

    head: MedusaHead
    target: SharesWeights
    states: Tensor  # [A, D] behind the target's final norm; not read where logits are known
    row: dict[int, int]
    logits: Tensor | None = None  # [K, A, V_d] of the first heads

    @torch.inference_mode()
    def at(self, place: int, requests: Sequence[int], before: Tensor) -> Tensor:
        """See `by_place.PlaceLogits`; heads that do not see the tokens before theirs are asked once per request."""
        device = self.states.device
        if self.logits is not None:
            rows = to_device([self.row[b] for b in requests], device)
            return self.head.vocabulary.expand(self.logits[place].index_select(0, rows))
        if self.head.config.is_sequential:
            beside = self.target.embed(before.flatten()).view(len(requests), -1)  # [A, (place + 1) * D]
            states = self.states[to_device([self.row[b] for b in requests], device)]
            return self.head.vocabulary.expand(self.head.predict(place, states, beside, self.target))
        asked = {b: i for i, b in enumerate(dict.fromkeys(requests))}
        states = self.states[to_device([self.row[b] for b in asked], device)]
        logits = self.head.vocabulary.expand(self.head.predict(place, states, None, self.target))
        return logits[to_device([asked[b] for b in requests], device)]

    def confidence(self, place: int, request: int) -> float:  # noqa: ARG002
        """See `by_place.PlaceLogits`: they have none."""
        return 1.0


class MedusaDrafter(HeadDrafter):
    """Chains and trees from trained heads that each predict one place."""

    name = "medusa"

    def __init__(self, head: MedusaHead, target: SharesWeights) -> None:
        self.head, self.target = head, target
        self.graphs = medusa_graphs(head, target)
        self._requests: dict[int, _Newest] = {}
        self._num_ranks = min(NUM_RANKS, len(head.vocabulary.ids))

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        head, target = open_head(factory, spec, MedusaHead)
        return cls(head, target)

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)(self.head, twin_target(self.target, twin))

    def hidden_layers(self) -> tuple[int, ...]:
        """See `base.HiddenStateReader`: the last."""
        return self.head.hidden_layers()

    def start(self, request: Request) -> None:
        """Nothing is known of a request yet."""
        chances = RankChances(self.head.config.num_heads, self._num_ranks)
        self._requests[request.request_id] = _Newest(chances)

    @torch.inference_mode()
    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`: the last row is kept."""
        (layer,) = self.head.hidden_layers()
        for one in rows:
            own = self._requests[one.request_id]
            own.state, own.stop = one.states[layer][-1:].clone(), one.stop  # a copy: the rest is not held on to

    def propose(self, batch: Batch) -> Draft:
        """Draft for the whole batch together; nothing where the newest state is not that before the anchor."""
        entries = batch.decoding
        owns = [self._requests[entry.request.request_id] for entry in entries]
        most = [
            min(entry.num_draft, self.head.config.num_heads)
            if own.state is not None and own.stop == entry.round_start - 1
            else 0
            for own, entry in zip(owns, entries, strict=True)
        ]
        predictions = self._read(owns, most)
        ranked = [b for b, entry in enumerate(entries) if entry.takes_trees and entry.request.spec.tree == "static"]
        others = [b for b in range(len(entries)) if b not in ranked]
        device = self.target.device
        parts = []
        if others:
            row = {i: predictions.row[b] for i, b in enumerate(others) if most[b]}
            chosen = [entries[b] for b in others], [most[b] for b in others], replace(predictions, row=row)
            parts.append((others, propose_by_place(self.name, device, *chosen)))
        if ranked:
            parts.append((ranked, self._propose_ranked(entries, most, ranked, predictions)))
        return merge_drafts(len(entries), parts, device)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Count which ranks were right."""
        for b, entry in enumerate(batch.decoding):
            own = self._requests[entry.request.request_id]
            if own.tree is not None:
                own.tree.count(verdict.emitted(b), own.chances)
                own.tree = None

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """See `base.AdaptableDrafter`: none, states are kept as the target computed them."""
        return ()

    def drop_computed(self) -> None:
        """See `base.AdaptableDrafter`: nothing is computed before it is used."""

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self._requests[request_id]

    def export_states(self, request_id: int, start: int, stop: int) -> object:  # noqa: ARG002
        """See `base.PrefixStates`: nothing, the newest state never comes from the cache."""
        return ()

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`: the last token of a text is never adopted, so its state will be read."""

    @torch.inference_mode()
    def _read(self, owns: Sequence[_Newest], most: Sequence[int]) -> _HeadPredictions:
        """The newest states of the requests that draft, behind the target's final norm."""
        asked = [b for b, num in enumerate(most) if num]
        states = [state for b in asked if (state := owns[b].state) is not None]
        row = {b: i for i, b in enumerate(asked)}
        if not states:
            return _HeadPredictions(self.head, self.target, torch.empty(0, dtype=torch.float32), row)
        together = torch.cat(states)
        logits = None if self.graphs is None else self.graphs.run(together, max(most))
        behind = self.target.final_norm(together) if logits is None else together
        return _HeadPredictions(self.head, self.target, behind, row, logits)

    def _propose_ranked(
        self, entries: Sequence[BatchEntry], most: Sequence[int], requests: Sequence[int], predictions: _HeadPredictions
    ) -> Draft:
        """Trees of rank tuples, filled with tokens level by level."""
        trees: dict[int, RankTree] = {}
        for b in requests:
            own = self._requests[entries[b].request.request_id]
            own.tree = trees[b] = RankTree(best_ranks(own.chances, entries[b].num_draft, most[b]))
        inner = [(b, node) for b in requests for node in trees[b].inner([-1])]
        place = 0
        while inner:
            before = [[entries[b].pending[-1], *trees[b].path(node)] for b, node in inner]
            logits = predictions.at(place, [b for b, _ in inner], to_device(before, self.target.device))
            (tops,) = to_host(logits.topk(self._num_ranks, dim=-1).indices)
            filled = [(b, trees[b].fill(node, own)) for (b, node), own in zip(inner, tops, strict=True)]
            inner = [(b, node) for b, children in filled for node in trees[b].inner(children)]
            place += 1
        drawn = [LookupTree(tuple(trees[b].tokens), tuple(node.parent for node in trees[b].ranks)) for b in requests]
        return assemble(self.name, drawn)
