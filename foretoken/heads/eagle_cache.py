"""An EAGLE head over a cache of blocks: one pass for the rows of many requests.

Row t of a sequence is that of the target's state of position t. Rows made from the target's states are kept; rows made
from the head's own output are draft tokens, of which nothing is kept (they are made again from the target's states once
they are accepted).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_chain import EagleChain, eagle_chain, embedding_of, output_of
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.attention.paged import PagedAttention
from foretoken.model.chain_kernel import reach
from foretoken.model.interface import Segment, SharesWeights
from foretoken.model.paged_cache import PagedCache, cache_beside
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
    """`head` for `target` with keys and values of its own, for as many tokens as the target's cache holds."""

    def __init__(self, head: EagleHead, target: SharesWeights, cache: PagedCache | None = None) -> None:
        self.head, self.target = head, target
        self.vocabulary = head.vocabulary.to(target.device)
        self.cache = cache or cache_beside(target, head.config.layer, head.norm_dtype)
        self._beside_layers = (head.fc, embedding_of(head, target), output_of(head, target))
        self._chain: tuple[tuple[object, ...], EagleChain | None] = ((), None)  # and the weights that it was made for
        self._compiled_chain()  # compiled before anybody waits for a draft

    @torch.inference_mode()
    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """What is kept of the target's states, by layer [n, D]: [n, D]."""
        return self.head.features(states, self.target)

    @torch.inference_mode()
    def run(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment]) -> EagleOutput:
        """Run rows of `tokens` [T] with their `features` [T, D], and keep the pending ones."""
        inputs = self.cache.admit(segments)
        positions, slots = to_device([inputs.positions, inputs.slots], self.cache.device)
        wanted = to_device(inputs.wanted, self.cache.device)
        attention = self.cache.attention(self.head.config.layer, self.cache.pool, slots, inputs.readers)
        rows = self.head.run(tokens, features, positions, attention, self.target)
        for segment in segments:
            if segment.num_pending:
                self.cache.commit(segment.sequence, segment.num_pending)
        logits = self.head.logits(rows.output[wanted], self.target)
        return EagleOutput(logits, rows.feedback[wanted], self.vocabulary)

    def draft(
        self, tokens: Tensor, features: Tensor, segments: Sequence[Segment], counts: Sequence[int]
    ) -> Tensor | None:
        """Run and keep rows as `run` does, and then the head behind itself: the likeliest tokens of a chain behind each
        segment, `counts` of them, one segment behind the other. None, and nothing done, where no compiled code does so:
        a part of the head has no kernel (`eagle_chain`), or torch reads the many rows of a segment faster.

        Raises:
            CapacityError: no room for rows of drafted tokens.
        """
        chain = self._compiled_chain()
        if chain is None or max(segment.num_rows for segment in segments) > PagedAttention.max_kernel_rows:
            return None
        requests = [
            reach(self.cache, segment.sequence, segment.num_pending, count)
            for segment, count in zip(segments, counts, strict=True)
        ]
        drafted = chain.draft(tokens, features, requests)
        for segment in segments:
            self.cache.commit(segment.sequence, segment.num_pending)
        return drafted

    def _compiled_chain(self) -> EagleChain | None:
        """Made once for the head's weights and the cache."""
        packed = [None if module is None else module.packed for module in self._beside_layers]
        marks = (self.cache.pool, *self.head.weight_marks(), *packed)
        known, chain = self._chain
        if len(known) != len(marks) or any(map(operator.is_not, known, marks)):
            chain = eagle_chain(self.head, self.target, self.cache)
            self._chain = marks, chain
        return chain
