"""A block drafter: one pass of a small network over the target's hidden states predicts the draft (`heads.block`).

The states of committed positions are kept as they come (`StatesDrafter`) and read when something is drafted. Keys and
values of the text before the anchor stay in a cache of the drafter's own, those of the block are forgotten each round.
From the predictions for all places a chain is drawn from left to right, or a tree grown, each with the head's
correction by the token before (`propose_by_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft
from foretoken.draft.base import Factory
from foretoken.draft.branches import propose_by_place
from foretoken.draft.head_drafter import USUAL_TOKENS, StatesDrafter, twin_target
from foretoken.draft.open_head import open_head
from foretoken.heads.block import BlockHead, CachedAttention, admit_blocks
from foretoken.heads.graphs import block_graphs
from foretoken.model.interface import LanguageModel, SharesWeights
from foretoken.model.paged_cache import cache_beside
from foretoken.transfer import to_device, to_host


@dataclass(frozen=True)
class _BlockPredictions:
    """What one pass says of all places (`by_place.PlaceLogits`); request b's rows begin at `first[b]`."""

    head: BlockHead
    base: Tensor  # [R, V_d] without the correction
    first: dict[int, int]
    sure: tuple[float, ...]  # [R], empty for a head that has no confidence

    @torch.inference_mode()
    def at(self, place: int, requests: Sequence[int], before: Tensor) -> Tensor:
        """See `by_place.PlaceLogits`."""
        rows = to_device([self.first[b] + place for b in requests], self.base.device)
        return self.head.vocabulary.expand(self.head.correct(self.base[rows], before[:, -1]))

    def confidence(self, place: int, request: int) -> float:
        """See `by_place.PlaceLogits`."""
        return self.sure[self.first[request] + place] if self.sure else 1.0


class BlockDrafter(StatesDrafter):
    """Chains or trees from one pass of a trained block drafter over all requests of the batch."""

    name = "block"

    def __init__(self, head: BlockHead, target: SharesWeights, twin: BlockDrafter | None = None) -> None:
        self.head, self.target = head, target
        if twin is None:
            cache = cache_beside(target, head.config.layer, head.norm.weight.dtype)
            self.graphs = block_graphs(head, target, cache)
        else:
            cache, self.graphs = twin.cache.twin_cache(), twin.graphs
        super().__init__(cache, head.hidden_layers(), head.features)

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        head, target = open_head(factory, spec, BlockHead)
        return cls(head, target)

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)(self.head, twin_target(self.target, twin), self)

    def propose(self, batch: Batch) -> Draft:
        """Draft up to `num_draft` tokens per request in one pass; none where the cache has no room, or the states of
        the text are not complete.
        """
        entries = batch.decoding
        most = [self._most(entry) for entry in entries]
        self.begin_round(entry.request.request_id for b, entry in enumerate(entries) if most[b])
        most = [most[b] if self._make_room(entry, most[b]) else 0 for b, entry in enumerate(entries)]
        predictions = self._predict(entries, most)
        return propose_by_place(self.name, self.cache.device, entries, most, predictions)

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """See `base.AdaptableDrafter`: those of `BlockHead.features`."""
        return ("fc.", "hidden_norm.")

    def _num_slots(self, num_places: int) -> int:
        """Slots of a block of which `num_places` predict."""
        config = self.head.config
        return config.block_size - config.num_places + num_places if config.is_causal else config.block_size

    def _most(self, entry: BatchEntry) -> int:
        """How deep a draft may be for one request."""
        anchor = entry.round_start - 1
        if self.kept[entry.request.request_id].num_rows != anchor:
            return 0  # rows that this step reads come between what is known and the anchor
        config = self.head.config
        most = min(entry.num_draft, config.num_places)
        while most and anchor + self._num_slots(most) > config.layer.max_context_tokens:
            most = most - 1 if config.is_causal else 0
        return most

    def _make_room(self, entry: BatchEntry, most: int) -> bool:
        sequence = entry.request.request_id
        missing = entry.round_start - 1 - self.cache.length(sequence)
        return most > 0 and self.make_room(sequence, missing + self._num_slots(most))

    @torch.inference_mode()
    def _predict(self, entries: Sequence[BatchEntry], most: Sequence[int]) -> _BlockPredictions:
        """The pass: new context rows and a block for every request that drafts."""
        head, cache = self.head, self.cache
        drafting = [b for b, num in enumerate(most) if num]
        if not drafting:
            return _BlockPredictions(head, torch.empty(0, dtype=torch.float32), {}, ())
        sequences = [entries[b].request.request_id for b in drafting]
        self.make_features(sequences)
        fused = [self.kept[one].features for one in sequences]
        held = [cache.length(one) for one in sequences]
        num_new = [len(own) - length for own, length in zip(fused, held, strict=True)]
        self.num_read_tokens = sum(num for num in num_new if num > USUAL_TOKENS)
        num_slots = [self._num_slots(most[b]) for b in drafting]
        tokens: list[int] = []
        wanted: list[int] = []  # slots that predict
        first: dict[int, int] = {}
        for b, slots in zip(drafting, num_slots, strict=True):
            first[b] = len(wanted)
            start = len(tokens) + head.config.block_size - head.config.num_places
            wanted += range(start, start + most[b])
            tokens += [entries[b].pending[-1], *[head.config.mask_token] * (slots - 1)]
        pieces = [own.between(length, len(own)) for own, length in zip(fused, held, strict=True) if len(own) > length]
        context = torch.cat(pieces) if pieces else head.norm.weight.new_empty(0, head.config.layer.hidden_size)
        hidden, base = self._run(to_device(tokens, cache.device), context, wanted, (sequences, num_new, num_slots))
        sure: tuple[float, ...] = ()
        if head.confidence_head is not None and any(entries[b].request.spec.min_confidence for b in drafting):
            sure = tuple(to_host(head.confidence_head(hidden).float().sigmoid())[0])
        return _BlockPredictions(head, base, first, sure)

    def _run(
        self, tokens: Tensor, context: Tensor, wanted: Sequence[int], rows: tuple[Sequence[int], list[int], list[int]]
    ) -> tuple[Tensor, Tensor]:
        """States [R, D] and logits [R, V_d] of the slots `wanted`; the context rows are kept. `rows`: see
        `heads.block.admit_blocks`.
        """
        head, cache = self.head, self.cache
        admitted = admit_blocks(cache, *rows, head.config.is_causal)
        if self.graphs is not None:
            replayed = self.graphs.run(tokens, context, admitted, wanted)
            if replayed is not None:
                admitted.commit(cache)
                return replayed
        attention = CachedAttention(cache, admitted)
        hidden = head.run(tokens, context, attention.positions, attention, self.target)
        admitted.commit(cache)
        hidden = hidden[to_device(wanted, cache.device)]
        return hidden, head.logits(hidden, self.target)
