"""A block drafter: one pass of a small network over the target's hidden states guesses the whole draft (`heads.block`).

The states of committed positions are kept as they come and are read when something is drafted: a request that is not
drafted for costs next to nothing. Keys and values of the text before the anchor stay in a cache of the drafter's own,
those of the block are forgotten each round. They can be made again from what is kept, so that a request that needs room
takes it from one that has not drafted for longest. From the guesses of all places a chain is drawn from left to right,
or a tree grown, each with the head's correction by the token before (`by_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback, HiddenRows, product_of
from foretoken.draft.by_place import propose_by_place
from foretoken.draft.chain import PROBABILITIES
from foretoken.draft.open_head import open_head
from foretoken.draft.stored_rows import StoredRows
from foretoken.heads.block import BlockHead
from foretoken.heads.block_attention import CachedAttention
from foretoken.model.interface import LanguageModel, SharesWeights
from foretoken.model.paged_cache import PagedCache
from foretoken.transfer import to_device, to_host

_MOST_UNREAD = 64  # deliveries of states that a request not drafted for keeps as they came
_USUAL_TOKENS = 8  # rows of committed text that any round may bring; more of them count as reading


@dataclass
class _Context:
    """What is kept of a request: `fused` features of its first positions, and states read since, not yet fused."""

    fused: StoredRows = field(default_factory=StoredRows)
    unread: list[HiddenRows] = field(default_factory=list)
    used: int = 0  # round in which it last drafted

    @property
    def num_rows(self) -> int:
        """Positions whose states are known."""
        return self.unread[-1].stop if self.unread else len(self.fused)


@dataclass(frozen=True)
class _BlockGuesses:
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


class BlockDrafter:
    """Chains or trees from one pass of a trained block drafter over all requests of the batch."""

    name = "block"
    keeps_answers = False  # see `base.FollowsText`

    def __init__(self, head: BlockHead, target: SharesWeights, cache: PagedCache | None = None) -> None:
        self.head, self.target = head, target
        self.cache = cache or PagedCache(
            head.config.layer, head.norm.weight.dtype, target.device, target.capacity_tokens, target.footprint_tokens(1)
        )
        self._contexts: dict[int, _Context] = {}
        self._round = 0
        self.num_read_tokens = 0  # see `base.Reads`

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`.

        Raises:
            ConfigError, ModelError: see `open_head`.
        """
        head, target = open_head(factory, spec, cls.name)
        assert isinstance(head, BlockHead)
        return cls(head, target)

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`: none beside the target."""
        return ()

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        target = twin(self.target)
        assert isinstance(target, SharesWeights)
        return type(self)(self.head, target, self.cache.twin_cache())

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: the chance that a position is drafted."""
        return product_of(spec, PROBABILITIES if spec.draft_probability == "auto" else {})

    def hidden_layers(self) -> tuple[int, ...]:
        """See `base.HiddenStateReader`."""
        return self.head.hidden_layers()

    def start(self, request: Request) -> None:
        """Keep room for the states of a request."""
        self._contexts[request.request_id] = _Context()
        self.cache.open(request.request_id)

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`."""
        for one in rows:
            own = self._contexts[one.request_id]
            assert one.start == own.num_rows, "a position is missing, or comes twice"
            own.unread.append(one)
            if len(own.unread) >= _MOST_UNREAD:
                self._fuse([one.request_id])

    def propose(self, batch: Batch) -> Draft:
        """Guess up to `num_draft` tokens per request in one pass; none where the cache has no room, or the states of
        the text are not complete.
        """
        entries = batch.decoding
        self._round += 1
        self.num_read_tokens = 0
        most = [self._most(entry) for entry in entries]
        for b, entry in enumerate(entries):
            if most[b]:
                self._contexts[entry.request.request_id].used = self._round
        most = [most[b] if self._make_room(entry, most[b]) else 0 for b, entry in enumerate(entries)]
        guesses = self._guess(entries, most)
        return propose_by_place(self.name, self.cache.device, entries, most, guesses)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Nothing: what was accepted comes as hidden states."""

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`: what was emitted comes as hidden states."""

    def release(self, request_id: int) -> None:
        """See `base.Releases`: the states come again."""
        self.cache.rollback(request_id, 0)
        self._contexts[request_id] = _Context()

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """See `base.AdaptableDrafter`: those of `BlockHead.features`."""
        return ("fc.", "hidden_norm.")

    def drop_computed(self) -> None:
        """See `base.AdaptableDrafter`: keys and values are made again from the features."""
        for sequence in self._contexts:
            self.cache.rollback(sequence, 0)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self._contexts[request_id]
        self.cache.close(request_id)

    @torch.inference_mode()
    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """See `base.PrefixStates`: fused features [stop - start, D], each of its own position alone."""
        self._fuse([request_id])
        return self._contexts[request_id].fused.between(start, stop).clone()

    @torch.inference_mode()
    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`."""
        for block in blocks:
            assert isinstance(block, Tensor)
            self._contexts[request_id].fused.append(block)

    def _num_slots(self, num_places: int) -> int:
        """Slots of a block of which `num_places` guess."""
        config = self.head.config
        return config.block_size - config.num_places + num_places if config.is_causal else config.block_size

    def _most(self, entry: BatchEntry) -> int:
        """How deep a draft may be for one request."""
        anchor = entry.round_start - 1
        if self._contexts[entry.request.request_id].num_rows != anchor:
            return 0  # rows that this step reads come between what is known and the anchor
        config = self.head.config
        most = min(entry.num_draft, config.num_places)
        while most and anchor + self._num_slots(most) > config.layer.max_context_tokens:
            most = most - 1 if config.is_causal else 0
        return most

    def _make_room(self, entry: BatchEntry, most: int) -> bool:
        """Room for the context's new rows and the block, with what requests hold that do not draft now if need be."""
        sequence = entry.request.request_id
        if not most:
            return False
        num_rows = entry.round_start - 1 - self.cache.length(sequence) + self._num_slots(most)
        if self.cache.reserve(sequence, num_rows):
            return True
        idle = [one for one, own in self._contexts.items() if own.used < self._round and self.cache.length(one)]
        for one in sorted(idle, key=lambda one: self._contexts[one].used):
            self.cache.rollback(one, 0)  # made again from its features when it drafts
            if self.cache.reserve(sequence, num_rows):
                return True
        return False

    @torch.inference_mode()
    def _fuse(self, requests: Sequence[int]) -> None:
        """Make features of all states that `requests` have read, in one call."""
        unread = [(self._contexts[one], rows) for one in requests for rows in self._contexts[one].unread]
        if not unread:
            return
        layers = self.head.hidden_layers()
        states = {layer: torch.cat([rows.states[layer] for _, rows in unread]) for layer in layers}
        pieces = self.head.features(states).split_with_sizes([len(rows.tokens) for _, rows in unread])
        for (own, _), piece in zip(unread, pieces, strict=True):
            own.fused.append(piece)
        for one in requests:
            self._contexts[one].unread.clear()

    @torch.inference_mode()
    def _guess(self, entries: Sequence[BatchEntry], most: Sequence[int]) -> _BlockGuesses:
        """The pass: new context rows and a block for every request that drafts."""
        head, cache = self.head, self.cache
        drafting = [b for b, num in enumerate(most) if num]
        if not drafting:
            return _BlockGuesses(head, torch.empty(0), {}, ())
        sequences = [entries[b].request.request_id for b in drafting]
        self._fuse(sequences)
        fused = [self._contexts[one].fused for one in sequences]
        held = [cache.length(one) for one in sequences]
        num_new = [len(own) - length for own, length in zip(fused, held, strict=True)]
        self.num_read_tokens = sum(num for num in num_new if num > _USUAL_TOKENS)
        num_slots = [self._num_slots(most[b]) for b in drafting]
        tokens: list[int] = []
        wanted: list[int] = []  # slots that guess
        first: dict[int, int] = {}
        for b, slots in zip(drafting, num_slots, strict=True):
            first[b] = len(wanted)
            start = len(tokens) + head.config.block_size - head.config.num_places
            wanted += range(start, start + most[b])
            tokens += [entries[b].pending[-1], *[head.config.mask_token] * (slots - 1)]
        attention = CachedAttention(cache, sequences, num_new, num_slots, head.config.is_causal)
        pieces = [own.between(length, len(own)) for own, length in zip(fused, held, strict=True) if len(own) > length]
        context = torch.cat(pieces) if pieces else head.norm.weight.new_empty(0, head.config.layer.hidden_size)
        flat, rows = to_device(tokens, cache.device), to_device(wanted, cache.device)
        hidden = head.run(flat, context, attention.positions, attention, self.target)[rows]  # [R, D]
        attention.commit()
        sure: tuple[float, ...] = ()
        if head.confidence_head is not None and any(entries[b].request.spec.min_confidence for b in drafting):
            sure = tuple(to_host(head.confidence_head(hidden).float().sigmoid())[0])
        return _BlockGuesses(head, head.logits(hidden, self.target), first, sure)
