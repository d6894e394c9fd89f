"""An EAGLE head over a cache of blocks: one pass for the rows of many requests.

Row t of a sequence is that of the target's state of position t. Rows made from the target's states are kept; rows made
from the head's own output are draft tokens, of which nothing is kept (they are made again from the target's states once
they are accepted).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from foretoken.heads.base import DraftVocabulary
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_chain import EagleChain, eagle_chain, embedding_of, output_of
from foretoken.heads.graphs import eagle_graphs, likeliest
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.chain_kernel import reach
from foretoken.model.interface import Segment, SharesWeights
from foretoken.model.paged_cache import ForwardInputs, cache_beside
from foretoken.transfer import to_device


@dataclass(frozen=True)
class EagleOutput:
    """Of the rows that were asked for: `own_logits` [R, V_d] over the head's `vocabulary`, `feedback` [R, D]."""

    own_logits: Tensor
    feedback: Tensor
    vocabulary: DraftVocabulary

    @property
    def logits(self) -> Tensor:
        """Logits over the target's vocabulary, [R, V]."""
        return self.vocabulary.expand(self.own_logits)


class CachedEagle:
    """`head` for `target` with keys and values of its own, for as many tokens as the target's cache holds.

    `graphs` replays steps of few rows, where steps are captured.
    """

    def __init__(self, head: EagleHead, target: SharesWeights) -> None:
        self.head, self.target = head, target
        self.vocabulary = head.vocabulary.to(target.device)
        self.cache = cache_beside(target, head.config.layer, head.norm_dtype)
        self.graphs = eagle_graphs(head, target, self.vocabulary, self.cache)
        self._beside_layers = (head.fc, embedding_of(head, target), output_of(head, target))
        self._chain: tuple[tuple[object, ...], EagleChain | None] = ((), None)  # and the weights that it was made for
        self._compiled_chain()  # compiled before anybody waits for a draft

    def twin(self, target: SharesWeights) -> Self:
        """The same head beside a twin of its target, over the same memory: see `PagedCache.twin_cache`."""
        twin = copy.copy(self)
        twin.target, twin.cache = target, self.cache.twin_cache()
        return twin

    @torch.inference_mode()
    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """What is kept of the target's states, by layer [n, D]: [n, D]."""
        return self.head.features(states, self.target)

    @torch.inference_mode()
    def run(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment]) -> EagleOutput:
        """Run rows of `tokens` [T] with their `features` [T, D], and keep the pending ones."""
        inputs = self.cache.admit(segments)
        replayed = None if self.graphs is None else self.graphs.run(tokens, features, inputs)
        found = self._run_eagerly(tokens, features, inputs) if replayed is None else replayed
        self._commit(segments)
        return EagleOutput(*found, self.vocabulary)

    def _run_eagerly(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
        """What `EagleGraphs.run` gives."""
        positions, slots = to_device([inputs.positions, inputs.slots], self.cache.device)
        wanted = to_device(inputs.wanted, self.cache.device)
        attention = self.cache.attention(self.head.config.layer, self.cache.pool, slots, inputs.readers)
        rows = self.head.run(tokens, features, positions, attention, self.target)
        return self.head.logits(rows.output[wanted], self.target), rows.feedback[wanted]

    def _commit(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if segment.num_pending:
                self.cache.commit(segment.sequence, segment.num_pending)

    def draft(
        self, tokens: Tensor, features: Tensor, segments: Sequence[Segment], counts: Sequence[int]
    ) -> Tensor | None:
        """Run and keep rows as `run` does, and then the head behind itself: the likeliest tokens of a chain behind each
        segment, `counts` of them, one segment behind the other. None, and nothing done, where that is no faster than
        `run` for each place: no step is captured, and a part of the head has no kernel (`eagle_chain`), or torch reads
        the many rows of a segment faster.

        Raises:
            CapacityError: no room for rows of drafted tokens.
        """
        if self.graphs is not None:
            return self._draft_by_steps(tokens, features, segments, counts)
        chain = self._compiled_chain()
        if chain is None or max(segment.num_rows for segment in segments) > PagedAttention.max_kernel_rows:
            return None
        requests = [
            reach(self.cache, segment.sequence, segment.num_pending, count)
            for segment, count in zip(segments, counts, strict=True)
        ]
        drafted = chain.draft(tokens, features, requests)
        self._commit(segments)
        return drafted

    @torch.inference_mode()
    def _draft_by_steps(
        self, tokens: Tensor, features: Tensor, segments: Sequence[Segment], counts: Sequence[int]
    ) -> Tensor:
        """See `draft`: a step for each place of the longest chain, whose tokens and features no host sees."""
        order = sorted(range(len(counts)), key=lambda i: -counts[i])  # those that go on stand first
        inputs = self.cache.admit(segments)
        inputs = replace(inputs, wanted=[inputs.wanted[i] for i in order])
        drafted: list[Tensor] = []  # by place
        for place in range(max(counts)):
            if place:
                growing = [segments[i].sequence for i in order if counts[i] > place]
                parents = (*range(-1, place - 1),)
                inputs = self.cache.admit([Segment(sequence, 0, parents, 1, place - 1) for sequence in growing])
                tokens, features = tokens[: len(growing)], features[: len(growing)]
            tokens, features = self._next_tokens(tokens, features, inputs)
            drafted.append(tokens)
            if not place:
                self._commit(segments)
        return self._by_chain(drafted, order, counts)

    def _next_tokens(self, tokens: Tensor, features: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
        """The likeliest token behind each row that is wanted, [R], and what the head goes on from, [R, D]."""
        replayed = None if self.graphs is None else self.graphs.next_tokens(tokens, features, inputs)
        if replayed is not None:
            return replayed
        own_logits, feedback = self._run_eagerly(tokens, features, inputs)
        return self.vocabulary.to_target(likeliest(own_logits)), feedback

    def _by_chain(self, drafted: Sequence[Tensor], order: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Tokens by place, each of the chains that are so long in `order`: one chain behind the other."""
        if min(counts) == max(counts):  # `order` is as they came
            return torch.stack(tuple(drafted), dim=1).flatten()
        first = [0, *accumulate(len(tokens) for tokens in drafted)]
        rank = {chain: number for number, chain in enumerate(order)}
        rows = [first[place] + rank[chain] for chain, count in enumerate(counts) for place in range(count)]
        return torch.cat(tuple(drafted))[to_device(rows, self.cache.device)]

    def _compiled_chain(self) -> EagleChain | None:
        """Made once for the head's weights and the cache."""
        packed = [None if module is None else module.packed for module in self._beside_layers]
        marks = (self.cache.pool, *self.head.weight_marks(), *packed)
        known, chain = self._chain
        if len(known) != len(marks) or any(map(operator.is_not, known, marks)):
            chain = eagle_chain(self.head, self.target, self.cache)
            self._chain = marks, chain
        return chain
