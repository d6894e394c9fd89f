"""A smaller language model drafts token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own cache (`own_cache`). After a round that accepted everything this lacks the last draft token, which the
model never ran itself: what is missing of the text is run first the next time. The chains themselves are drawn in
`chain`, trees in `branches`: a tree's nodes of one depth are run together, and stay in the cache as draft tokens until
it is known which path was accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft import branches
from foretoken.draft.base import Drafter, Factory, Feedback
from foretoken.draft.branches import Growth
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.draft.own_cache import OwnCacheDrafter
from foretoken.errors import ConfigError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.names import model_folder
from foretoken.model.resized import resized
from foretoken.spec_checks import A_DRAFT
from foretoken.text.tokenizer import load_tokenizer
from foretoken.text.vocabulary import match_tokenizers, warn_of_text
from foretoken.transfer import to_device


class DraftModelDrafter(OwnCacheDrafter):
    """Chains or trees sampled from a draft model under the request's own sampling parameters."""

    name = "draft_model"
    keeps_answers = False  # see `base.FollowsText`

    def __init__(self, model: LanguageModel) -> None:
        self._texts: dict[int, list[int]] = {}  # committed text
        super().__init__(model, self._texts.__getitem__)
        # Nodes in the cache, by request: (parent, token) -> number, -1 = the committed text.
        self._held: dict[int, dict[tuple[int, int], int]] = {}

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Drafter:
        """Load the draft model: in the target's own tokens, or across two tokenizers.

        Raises:
            ConfigError: no draft is named.
            MismatchError: see `match_tokenizers`.
            CheckpointError, UnsupportedModelError: the model cannot be loaded.
        """
        if spec.draft is None:
            raise ConfigError("draft", None, f"drafter={spec.drafter!r} needs {A_DRAFT}")
        folder = model_folder(spec.draft)
        model, draft_text = factory.open_draft(folder, spec.draft_dtype), load_tokenizer(folder)
        found = match_tokenizers(
            factory.target, factory.tokenizer, model, draft_text, name=spec.draft, vocabulary=spec.draft_vocabulary
        )
        if found is None:
            return cls(resized(model, factory.target.vocab_size))
        drafter = OtherVocabularyDrafter(model, found.target, found.draft, found.how)
        warn_of_text(found, spec.draft, len(drafter.shared))
        return drafter

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)(twin(self.model))

    def start(self, request: Request) -> None:
        """Open a sequence; the prompt is run when something is first drafted."""
        self._texts[request.request_id] = list(request.prompt_ids)
        self._cache.start(request.request_id, request.params.tenant)

    def propose(self, batch: Batch) -> Draft:
        """Draft up to `num_draft` tokens per request; a request for which the cache has no room gets none."""
        entries = batch.decoding
        self._cache.begin_round(entry.request.request_id for entry in entries if entry.num_draft)
        return branches.propose_by_shape(
            entries,
            self.model.device,
            lambda some: self._propose_chains([entries[b] for b in some]),
            lambda some: self._propose_trees([entries[b] for b in some]),
        )

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Cut the cache back to what was accepted."""
        for b, entry in enumerate(batch.decoding):
            sequence, emitted = entry.request.request_id, verdict.emitted(b)
            self._texts[sequence].extend(emitted)
            # Draft tokens that were inputs too; negative: nothing was drafted.
            ran = self.model.length(sequence) - entry.round_start
            if ran < 0:
                continue
            nodes = self._held.pop(sequence, None)
            if nodes is not None:
                path = _path(nodes, verdict.accepted[b])
                self.model.commit(sequence, 0, path)
                ran = len(path)
            held = min(len(verdict.accepted[b]), ran)
            self.model.rollback(sequence, entry.round_start + held)
        self._cache.publish_read()

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`: the tokens are run when something is drafted again."""
        self._texts[request_id].extend(tokens)

    def finish(self, request_id: int) -> None:
        """Close the sequence; what it holds of the text may serve another one."""
        self._cache.finish(request_id)
        del self._texts[request_id]
        self._held.pop(request_id, None)

    def _propose_chains(self, entries: Sequence[BatchEntry]) -> Draft:
        chains = [Chain(entry, self._cache.room(entry)) for entry in entries]
        growing = [chain for chain in chains if chain.grows]
        while growing:
            logits = self._advance(growing)
            extend(growing, logits)
            growing = [chain for chain in growing if chain.grows]
        return assemble(self.name, self.model.device, chains)

    def _propose_trees(self, entries: Sequence[BatchEntry]) -> Draft:
        growths = [Growth(entry, entry.num_draft, self._cache.room(entry)) for entry in entries]
        growing = [growth for growth in growths if growth.frontier]
        while growing:
            branches.extend(growing, self._run_level(growing))
            growing = [growth for growth in growing if growth.frontier and self._has_room(growth)]
        for growth in growths:
            if not growth.level:
                continue  # nothing was run
            place = {-1: -1} | {node: number for number, node in enumerate(growth.ran)}
            nodes = {
                (place[growth.parents[node]], growth.tokens[node]): number for number, node in enumerate(growth.ran)
            }
            self._held[growth.entry.request.request_id] = nodes
        return branches.assemble(self.name, self.model.device, growths)

    def _has_room(self, growth: Growth) -> bool:
        return self.model.reserve(growth.entry.request.request_id, len(growth.ran) + len(growth.frontier))

    def _run_level(self, growths: Sequence[Growth]) -> Tensor:
        """Run the frontier of every tree, at first the committed tokens before it; logits `[A, V]` after its nodes."""
        tokens: list[int] = []
        segments: list[Segment] = []
        for growth in growths:
            if growth.level:
                tokens += [growth.tokens[node] for node in growth.frontier]
                segments.append(growth.segment())
            else:
                sequence = growth.entry.request.request_id
                pending = self._cache.take_pending(sequence)
                tokens += pending
                segments.append(Segment(sequence, len(pending)))
        return self._cache.run(to_device(tokens, self.model.device), segments)

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
            pending = self._cache.take_pending(sequence)
            pieces.append(to_device(pending, device))
            segments.append(Segment(sequence, len(pending)))
        return self._cache.run(torch.cat(pieces), segments)


def _path(nodes: Mapping[tuple[int, int], int], tokens: Sequence[int]) -> list[int]:
    """The nodes that spell `tokens` from the root on, as far as there are any."""
    path: list[int] = []
    for token in tokens:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path
