"""An EAGLE head over a cache of blocks: one pass for the rows of many requests.

Row t of a sequence is that of the target's state of position t. Rows made from the target's states are kept; rows made
from the head's own output are draft tokens, of which nothing is kept (they are made again from the target's states once
they are accepted).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.heads.eagle import EagleHead, EagleRows
from foretoken.heads.eagle_chain import EagleChain, chain_marks, eagle_chain, reaches
from foretoken.heads.vocabulary import DraftVocabulary
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
        self._chain: tuple[tuple[object, ...], EagleChain | None] = ((), None)  # and the weights that it was made for

    @torch.inference_mode()
    def features(self, states: Mapping[int, Tensor]) -> Tensor:
        """What is kept of the target's states, by layer [n, D]: [n, D]."""
        return self.head.features(states, self.target)

    @torch.inference_mode()
    def run(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment]) -> EagleOutput:
        """Run rows of `tokens` [T] with their `features` [T, D], and keep the pending ones."""
        rows = self._run(tokens, features, segments)
        return EagleOutput(self.head.logits(rows.output, self.target), rows.feedback, self.vocabulary)

    @torch.inference_mode()
    def draft(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment], counts: Sequence[int]) -> Tensor:
        """Run rows as `run` does, each segment's last one is wanted, and then the head behind itself: the likeliest
        tokens of a chain for each segment, `counts` of them, one segment behind the other. Only where `drafts_chains`.

        Raises:
            CapacityError: no room for rows of drafted tokens.
        """
        chain = self._compiled_chain()
        assert chain is not None
        rows = self._run(tokens, features, segments)
        return chain.draft(rows, reaches(self.cache, [segment.sequence for segment in segments], counts))

    @property
    def drafts_chains(self) -> bool:
        """Whether `draft` runs here: see `eagle_chain.eagle_chain`."""
        return self._compiled_chain() is not None

    def _compiled_chain(self) -> EagleChain | None:
        """Made once for the head's weights and the cache."""
        marks = (self.cache.pool, *chain_marks(self.head, self.target))
        known, chain = self._chain
        if len(known) != len(marks) or any(one is not other for one, other in zip(known, marks, strict=True)):
            chain = eagle_chain(self.head, self.target, self.cache)
            self._chain = marks, chain
        return chain

    def _run(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment]) -> EagleRows:
        """The rows wanted of those that are run."""
        inputs = self.cache.admit(segments)
        positions, slots = to_device([inputs.positions, inputs.slots], self.cache.device)
        wanted = to_device(inputs.wanted, self.cache.device)
        attention = self.cache.attention(self.head.config.layer, self.cache.pool, slots, inputs.readers)
        rows = self.head.run(tokens, features, positions, attention, self.target)
        for segment in segments:
            if segment.num_pending:
                self.cache.commit(segment.sequence, segment.num_pending)
        return EagleRows(rows.output[wanted], rows.feedback[wanted])
