"""The drafts of several drafters as one tree per request.

All parts draft in every round. Lookups' draft tokens are ranked by the chances that they name, those of a part that
runs a model by a constant chance per place, and the likeliest of all form the tree. How many tokens the model part
draws follows from that ranking, before anything is drawn: it depends on the committed text and the budget alone, never
on drawn tokens, so sampled tokens keep their distribution. Lookups' tokens join what was drawn afterwards (`merge`).

Rules that take chains only get the likelier of two chains, that of one lookup or that of the model part, chosen
likewise before anything is drawn.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Mass, Request, Verdict, empty_draft
from foretoken.draft.base import (
    Drafter,
    Factory,
    Feedback,
    HiddenRows,
    HiddenStateReader,
    PrefixStates,
    Reads,
    Releases,
    Resets,
    variants_of,
)
from foretoken.draft.lookup_tree import Lookup
from foretoken.draft.merging import allowed_tree, keep_nodes, merge_drafts
from foretoken.draft.tree import OVERLAP, TreeNode, merge_trees
from foretoken.errors import ConfigError
from foretoken.transfer import to_device


def share_of(drawn: Sequence[float], found: Sequence[TreeNode], budget: int) -> int:
    """How many of the places with chances `drawn`, which fall from one to the next, are among the `budget` likeliest of
    these places and the nodes `found`.
    """
    ranked = sorted([(-chance, 0) for chance in drawn] + [(-node.estimate, 1) for node in found])
    return sum(not other for _, other in ranked[:budget])


def graft(name: str, base: Draft, found: Sequence[Sequence[TreeNode]], budgets: Sequence[int]) -> Draft:
    """`base` with the nodes of the trees `found` [B] added up to `budgets` [B] nodes per request, under the name
    `name`.

    The nodes of `base` keep their numbers; every node has the drafter that drafted it as its provenance.
    """
    if not any(found):
        return _with_provenance(name, base)
    device, host = base.tokens.device, base.host_tokens
    tokens: list[int] = []
    parents: list[int] = []
    offsets = [0]
    sampled: list[bool] = []
    distribution_of_row: list[int] = []
    provenance: list[str | None] = []
    for b, (tree, budget) in enumerate(zip(found, budgets, strict=True)):
        own = slice(base.offsets[b], base.offsets[b + 1])
        chosen, above = _additions(host[own], base.parents[own], tree, budget)
        tokens += [*host[own], *(tree[node].token for node in chosen)]
        parents += [*base.parents[own], *above]
        sampled += [*(base.sampled[own] if base.sampled else (False,) * base.lengths[b]), *(False for _ in chosen)]
        provenance += [*base.provenance_of(b), *(tree[node].drafter for node in chosen)]
        distribution_of_row += [
            base.mass.distribution_of_row[row] if base.mass is not None else -1 for row in base.rows_of([b])
        ]
        distribution_of_row += [-1] * len(chosen)
        offsets.append(len(tokens))
    return Draft(
        tokens=to_device(tokens, device),
        parents=tuple(parents),
        offsets=tuple(offsets),
        drafters=tuple(
            name if base.drafters[b] is not None or offsets[b + 1] > offsets[b] else None
            for b in range(base.num_requests)
        ),
        sampled=tuple(sampled) if base.mass is not None else (),
        mass=None if base.mass is None else Mass(base.mass.distributions, tuple(distribution_of_row)),
        provenance=tuple(provenance),
        inner=base.inner,
    )


def _additions(
    own: Sequence[int], own_parents: Sequence[int], tree: Sequence[TreeNode], budget: int
) -> tuple[list[int], list[int]]:
    """The nodes of `tree` that join one request's nodes `own`, the likeliest first, and the parent of each there."""
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(own_parents, own, strict=True))}
    place: dict[int, int] = {-1: -1}  # node of the tree found -> node of the merged one
    chosen: list[int] = []
    above: list[int] = []
    # No node is likelier than its parent.
    for node in sorted(range(len(tree)), key=lambda node: (-tree[node].estimate, node)):
        if tree[node].parent not in place:
            continue
        parent = place[tree[node].parent]
        if (parent, tree[node].token) in child:
            place[node] = child[parent, tree[node].token]
        elif len(own) + len(chosen) < budget:
            place[node] = len(own) + len(chosen)
            above.append(parent)
            chosen.append(node)
    return chosen, above


def _with_provenance(name: str, base: Draft) -> Draft:
    """`base` under another drafter's name, its nodes under their own."""
    own = [drafter for b in range(base.num_requests) for drafter in base.provenance_of(b)]
    return replace(
        base, drafters=tuple(None if drafter is None else name for drafter in base.drafters), provenance=tuple(own)
    )


@dataclass(frozen=True)
class _MergePlan:
    """One request's round: the deterministic tokens that may join, and how many tokens the model part draws."""

    found: Sequence[TreeNode] = ()
    num_drawn: int = 0


class MixDrafter:
    """`parts` draft together, in the order of the requests' `spec.parts`; at most one of them is no lookup."""

    name = "mix"

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = tuple(parts)
        others = [index for index, part in enumerate(self.parts) if not isinstance(part, Lookup)]
        if len(others) > 1:
            names = ", ".join(self.parts[index].name for index in others)
            raise ConfigError(
                "parts", names, "all parts of a mix but one must show their drafts; use drafter='auto' for these"
            )
        self._model = others[0] if others else None  # place of the part that runs a model
        self._reader = self._reading_part()
        self._drawn: dict[int, int] = {}  # by request: tokens of the model part in this round; they stand first
        self.num_read_tokens = 0  # see `base.Reads`: of the model part

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        return cls([factory.make(part) for part in spec.configs])

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: those of the parts."""
        if self._model is None:
            return (spec,)
        own = spec.configs[self._model]
        return tuple(
            replace(
                spec,
                parts=(*spec.configs[: self._model], one, *spec.configs[self._model + 1 :]),
                draft_probability=one.draft_probability,
            )
            if one is not own
            else spec
            for one in variants_of(self.parts[self._model], own)
        )

    def start(self, request: Request) -> None:
        """Hand the request to every part, under that part's own configuration."""
        assert len(request.spec.configs) == len(self.parts)
        for part, spec in zip(self.parts, request.spec.configs, strict=True):
            part.start(replace(request, spec=spec))

    def propose(self, batch: Batch) -> Draft:
        """Merge what the parts draft for every request."""
        entries = batch.decoding
        plans = [self._plan(entry) for entry in entries]
        base = self._draw(entries, plans)
        draft = graft(self.name, base, [plan.found for plan in plans], [entry.num_draft for entry in entries])
        for b, plan in enumerate(plans):
            if plan.num_drawn:
                self._drawn[entries[b].request.request_id] = base.lengths[b]
        return draft

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Tell every part what was emitted."""
        entries = batch.decoding
        drawn = [self._drawn.pop(entry.request.request_id, draft.lengths[b]) for b, entry in enumerate(entries)]
        for index, part in enumerate(self.parts):
            own = Batch(tuple(_entry_of(entry, index, entry.num_draft) for entry in entries))
            if index != self._model or drawn == list(draft.lengths):
                part.commit(own, draft, verdict, feedback)
            else:
                _commit_in_turns(part, own, draft, verdict, feedback, drawn)

    def hidden_layers(self) -> tuple[int, ...]:
        """See `base.HiddenStateReader`: those of the part that runs a model, if it is a trained head."""
        return () if self._reader is None else self._reader.hidden_layers()

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`."""
        assert self._reader is not None
        self._reader.read_hidden(rows)

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """See `base.PrefixStates`."""
        assert self._reader is not None
        return self._reader.export_states(request_id, start, stop)

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`."""
        assert self._reader is not None
        self._reader.adopt_states(request_id, blocks)

    def release(self, request_id: int) -> None:
        """See `base.Releases`: every part that has a cache."""
        for part in self.parts:
            if isinstance(part, Releases):
                part.release(request_id)

    def finish(self, request_id: int) -> None:
        """Let every part forget the request."""
        self._drawn.pop(request_id, None)
        for part in self.parts:
            part.finish(request_id)

    def reset(self) -> None:
        """See `base.Resets`: every part."""
        for part in self.parts:
            if isinstance(part, Resets):
                part.reset()

    def _reading_part(self) -> PrefixStates | None:
        """The part that reads hidden states; it must share them, because a mix says of all its parts that they do."""
        part = None if self._model is None else self.parts[self._model]
        if part is None or not isinstance(part, HiddenStateReader):
            return None
        if not isinstance(part, PrefixStates):
            raise ConfigError("parts", part.name, "reads hidden states without sharing them; use drafter='auto'")
        return part

    def _plan(self, entry: BatchEntry) -> _MergePlan:
        """What the lookups draft, and how much the model part draws: settled before anything is drawn."""
        if not entry.num_draft:
            return _MergePlan()
        trees = [self._nodes(entry, index, part) for index, part in enumerate(self.parts) if isinstance(part, Lookup)]
        most = 0 if self._model is None else entry.request.spec.configs[self._model].at_most(entry.num_draft)
        chances = list(itertools.accumulate([OVERLAP] * most, lambda before, chance: before * chance))
        if entry.takes_trees:
            found = merge_trees(trees, sum(map(len, trees)))
            return _MergePlan(found, share_of(chances, found, entry.num_draft))
        best = max(trees, key=_expected, default=[])
        if _expected(best) >= sum(chances):
            return _MergePlan(best)
        return _MergePlan((), most)

    def _nodes(self, entry: BatchEntry, index: int, part: Lookup) -> list[TreeNode]:
        most = entry.request.spec.configs[index].at_most(entry.num_draft)
        tree = allowed_tree(part.look_up(_entry_of(entry, index, most)), entry.processors)
        nodes = zip(tree.tokens, tree.parents, tree.chances, strict=True)
        return [TreeNode(token, parent, chance, part.name) for token, parent, chance in nodes]

    def _draw(self, entries: Sequence[BatchEntry], plans: Sequence[_MergePlan]) -> Draft:
        """What the model part drafts, for all requests for which it draws at once."""
        self.num_read_tokens = 0
        asked = [b for b, plan in enumerate(plans) if plan.num_drawn]
        if self._model is None or not asked:
            return empty_draft(len(entries))
        part = self.parts[self._model]
        own = tuple(_entry_of(entries[b], self._model, plans[b].num_drawn) for b in asked)
        drawn = part.propose(Batch(own))
        self.num_read_tokens = part.num_read_tokens if isinstance(part, Reads) else 0
        return merge_drafts(len(entries), [(asked, drawn)], drawn.tokens.device)


def _expected(tree: Sequence[TreeNode]) -> float:
    """How many tokens of a tree are expected to be accepted."""
    return sum(node.estimate for node in tree)


def _entry_of(entry: BatchEntry, part: int, num_draft: int) -> BatchEntry:
    """What a part is asked for."""
    own = replace(entry.request, spec=entry.request.spec.configs[part])
    return replace(entry, request=own, num_draft=num_draft)


def _commit_in_turns(
    part: Drafter, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback, counts: Sequence[int]
) -> None:
    """Tell a part that drafted only the first `counts[b]` nodes of each request: a round over those nodes, then a
    round for every further token.

    No part receives a verdict on tokens that it did not draft.
    """
    emitted = [verdict.emitted(b) for b in range(draft.num_requests)]
    kept = [tuple(node for node in path if node < count) for path, count in zip(verdict.paths, counts, strict=True)]
    own = Verdict(
        tuple(kept),
        tuple(tokens[: len(path)] for tokens, path in zip(emitted, kept, strict=True)),
        tuple(tokens[len(path)] for tokens, path in zip(emitted, kept, strict=True)),
        verdict.next_kinds,
    )
    rows = [feedback.rows[draft.anchor_row(b) + row] for b, count in enumerate(counts) for row in range(1 + count)]
    part.commit(batch, keep_nodes(draft, [range(count) for count in counts]), own, replace(feedback, rows=tuple(rows)))
    done = [1 + len(path) for path in kept]
    while left := [b for b, tokens in enumerate(emitted) if done[b] < len(tokens)]:
        entries = tuple(
            replace(entry, start=entry.round_start + done[b] - 1, pending=(emitted[b][done[b] - 1],), num_draft=0)
            for b, entry in ((b, batch.decoding[b]) for b in left)
        )
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(left)
        one = Verdict(
            nothing, nothing, tuple(emitted[b][done[b]] for b in left), tuple(verdict.next_kinds[b] for b in left)
        )
        rows = [feedback.rows[draft.anchor_row(b) + 1 + verdict.paths[b][done[b] - 1]] for b in left]
        part.commit(Batch(entries), empty_draft(len(left)), one, replace(feedback, rows=tuple(rows)))
        for b in left:
            done[b] += 1
