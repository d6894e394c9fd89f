"""A smaller language model guesses token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own cache. After a round that accepted everything its cache lacks the last guess, which it never ran
itself: such tokens wait in `pending` and are run first the next time. The chains themselves are drawn in `chain`, trees in
`branches`: a tree's nodes of one depth are run together, and stay in the cache as guesses until it is known which path was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict, merge_drafts
from foretoken.draft import branches
from foretoken.draft.base import Feedback
from foretoken.draft.branches import Growth
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.model.interface import LanguageModel, PrefixModel, Segment

_CATCH_UP_TOKENS = 512  # rows of a long prompt that the draft model takes in one forward


class DraftModelDrafter:
    """Chains or trees sampled from a draft model under the request's own sampling parameters."""

    name = "draft_model"

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._pending: dict[int, list[int]] = {}  # committed tokens that the draft's cache does not hold yet
        self._texts: dict[int, tuple[str, list[int]]] = {}  # tenant and committed text
        self._released: set[int] = set()  # their cache was given back: it may begin with what is known of the text
        self._held: dict[int, dict[tuple[int, int], int]] = {}  # nodes in the cache: (parent, token) -> number, -1 = the committed text

    def start(self, request: Request) -> None:
        """Open a sequence; what another one did not run of the prompt is run when something is first drafted."""
        sequence, known = request.request_id, 0
        self.model.open(sequence)
        self._texts[sequence] = (request.spec.tenant, list(request.prompt_ids))
        if isinstance(self.model, PrefixModel):
            known = self.model.adopt(sequence, request.prompt_ids, request.spec.tenant)
        self._pending[sequence] = list(request.prompt_ids[known:])

    def propose(self, batch: Batch) -> Draft:
        """Guess up to `num_draft` tokens per request; a request for which the cache has no room gets none."""
        entries = batch.decoding
        with_tree = [b for b, entry in enumerate(entries) if entry.takes_trees and entry.request.spec.tree != "chain"]
        if not with_tree:
            return self._propose_chains(entries)
        others = [b for b in range(len(entries)) if b not in with_tree]
        chains, trees = self._propose_chains([entries[b] for b in others]), self._propose_trees([entries[b] for b in with_tree])
        return merge_drafts(len(entries), [(others, chains), (with_tree, trees)], self.model.device)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Cut the cache back to what was accepted and note what it still has to run."""
        for b, entry in enumerate(batch.decoding):
            sequence, emitted = entry.request.request_id, verdict.emitted(b)
            self._texts[sequence][1].extend(emitted)
            ran = self.model.length(sequence) - entry.round_start  # guesses that were inputs too; negative: nothing was drafted
            if ran < 0:
                self._pending[sequence].extend(emitted)
                continue
            nodes = self._held.pop(sequence, None)
            if nodes is not None:
                path = _path(nodes, verdict.accepted[b])
                self.model.commit(sequence, 0, path)
                ran = len(path)
            held = min(len(verdict.accepted[b]), ran)
            self.model.rollback(sequence, entry.round_start + held)
            self._pending[sequence] = list(emitted[held:])

    def release(self, request_id: int) -> None:
        """Empty the cache; the text, but for what is found of it, is run again when something is next drafted."""
        tenant, text = self._texts[request_id]
        if isinstance(self.model, PrefixModel):
            self.model.publish(request_id, text, tenant)
        self.model.rollback(request_id, 0)
        self._pending[request_id] = list(text)
        self._released.add(request_id)

    def finish(self, request_id: int) -> None:
        """Close the sequence; what it holds of the text may serve another one."""
        tenant, text = self._texts.pop(request_id)
        if isinstance(self.model, PrefixModel):
            self.model.publish(request_id, text, tenant)
        self.model.close(request_id)
        del self._pending[request_id]
        self._held.pop(request_id, None)
        self._released.discard(request_id)

    def _propose_chains(self, entries: Sequence[BatchEntry]) -> Draft:
        chains = [Chain(entry, self._room(entry)) for entry in entries]
        growing = [chain for chain in chains if chain.grows]
        while growing:
            logits = self._advance(growing)
            extend(growing, logits)
            growing = [chain for chain in growing if chain.grows]
        return assemble(self.name, self.model.device, chains)

    def _propose_trees(self, entries: Sequence[BatchEntry]) -> Draft:
        growths = [Growth(entry, entry.num_draft, self._room(entry)) for entry in entries]
        growing = [growth for growth in growths if growth.frontier]
        while growing:
            branches.extend(growing, self._run_level(growing))
            growing = [growth for growth in growing if growth.frontier and self._has_room(growth)]
        for growth in growths:
            if not growth.level:
                continue  # nothing was run
            place = {-1: -1} | {node: number for number, node in enumerate(growth.ran)}
            nodes = {(place[growth.parents[node]], growth.tokens[node]): number for number, node in enumerate(growth.ran)}
            self._held[growth.entry.request.request_id] = nodes
        return branches.assemble(self.name, self.model.device, growths)

    def _room(self, entry: BatchEntry) -> int:
        """How many tokens can follow one another in a draft for `entry` within the draft's context and cache."""
        sequence = entry.request.request_id
        length = min(entry.num_draft, self.model.max_context_tokens - entry.round_start)
        self._adopt_again(sequence)
        if length <= 0 or not self.model.reserve(sequence, len(self._pending[sequence]) + length):
            return 0
        return length

    def _adopt_again(self, sequence: int) -> None:
        """Begin a released sequence with what is known of its text."""
        if sequence in self._released:
            self._released.remove(sequence)
            if isinstance(self.model, PrefixModel):
                del self._pending[sequence][: self.model.adopt(sequence, self._pending[sequence], self._texts[sequence][0])]

    def _has_room(self, growth: Growth) -> bool:
        """Whether the draft's cache has room for a tree's next level."""
        return self.model.reserve(growth.entry.request.request_id, len(growth.ran) + len(growth.frontier))

    def _run_level(self, growths: Sequence[Growth]) -> Tensor:
        """Run the frontier of every tree, at first the committed tokens before it; logits `[A, V]` after its nodes."""
        tokens: list[int] = []
        segments: list[Segment] = []
        for growth in growths:
            sequence = growth.entry.request.request_id
            if growth.level:
                place = {-1: -1} | {node: number for number, node in enumerate((*growth.ran, *growth.frontier))}
                parents = tuple(place[growth.parents[node]] for node in (*growth.ran, *growth.frontier))
                tokens += [growth.tokens[node] for node in growth.frontier]
                segments.append(Segment(sequence, 0, parents, len(growth.frontier), len(growth.ran)))
            else:
                pending = self._take_pending(sequence)
                tokens += pending
                segments.append(Segment(sequence, len(pending)))
        logits = self.model.forward(torch.tensor(tokens, dtype=torch.int64, device=self.model.device), segments).logits
        for segment in segments:
            if segment.num_pending:
                self.model.commit(segment.sequence, segment.num_pending)
        return logits

    def _take_pending(self, sequence: int) -> list[int]:
        """The committed tokens to run now, the last of them included; a longer backlog is caught up with first."""
        pending, self._pending[sequence] = catch_up(self.model, sequence, self._pending[sequence]), []
        return pending

    def _advance(self, chains: list[Chain]) -> Tensor:
        """Run the next input of every chain, a backlog of committed tokens first; logits `[A, V]` after it."""
        device = self.model.device
        pieces: list[Tensor] = []
        segments: list[Segment] = []
        for chain in chains:
            sequence = chain.entry.request.request_id
            if chain.tokens:
                pieces.append(chain.tokens[-1][None])
                segments.append(Segment(sequence, 1))
                continue
            pending = self._take_pending(sequence)
            pieces.append(torch.tensor(pending, dtype=torch.int64, device=device))
            segments.append(Segment(sequence, len(pending)))
        logits = self.model.forward(torch.cat(pieces), segments).logits
        for segment in segments:
            self.model.commit(segment.sequence, segment.num_pending)
        return logits


def catch_up(model: LanguageModel, sequence: int, pending: list[int]) -> list[int]:
    """Run a long backlog (a prompt) in pieces; what is left, at most one piece, is to be run with everybody else's rows."""
    while len(pending) > _CATCH_UP_TOKENS:
        piece, pending = pending[:_CATCH_UP_TOKENS], pending[_CATCH_UP_TOKENS:]
        model.forward(torch.tensor(piece, dtype=torch.int64, device=model.device), [Segment(sequence, len(piece), (), 0)])
        model.commit(sequence, len(piece))
    return pending


def _path(nodes: Mapping[tuple[int, int], int], tokens: Sequence[int]) -> list[int]:
    """The nodes that spell `tokens` from the root on, as far as there are any."""
    path: list[int] = []
    for token in tokens:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
