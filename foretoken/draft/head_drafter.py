"""What drafters of trained heads share: no model beside the target, and its hidden states in place of commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Verdict
from foretoken.draft.base import Feedback, HiddenRows, product_of
from foretoken.draft.chain import PROBABILITIES
from foretoken.model.interface import LanguageModel, SharesWeights
from foretoken.model.paged_cache import PagedCache

# ---- the target's hidden states that a head keeps of its requests
#
# States are stored as they come and become features when the head is asked: a request that is not drafted for costs
# next to nothing. The head's keys and values can be made again from the features, so that a request that needs room
# takes it from one that has not drafted for longest.


class StoredRows:
    """A growing `[n, D]`; room grows by doubling, so that appending costs no copy of the whole each time."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None  # [room, D]
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def append(self, rows: Tensor) -> None:
        """Add `rows` [m, D] at the end."""
        num = self._num + len(rows)
        if self._rows is None or len(self._rows) < num:
            room = rows.new_empty(max(num, 2 * self._num), rows.shape[1])
            if self._rows is not None:
                room[: self._num] = self._rows[: self._num]
            self._rows = room
        self._rows[self._num : num] = rows
        self._num = num

    def between(self, start: int, stop: int) -> Tensor:
        """The rows `start` .. `stop`, a view [stop - start, D]."""
        assert self._rows is not None
        assert start <= stop <= self._num
        return self._rows[start:stop]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows, self._num = None, 0


USUAL_TOKENS = 8  # rows of committed text that any round may bring; more of them count as reading
_MAX_UNREAD = 64  # deliveries of states that a request not drafted for keeps as they came

Fuse = Callable[[Mapping[int, Tensor]], Tensor]  # states by layer, each [n, Dt] -> features [n, D]


@dataclass
class KeptStates:
    """What is kept of a request: `features` of its first positions, and states read since, not yet features."""

    features: StoredRows = field(default_factory=StoredRows)
    unread: list[HiddenRows] = field(default_factory=list)
    used: int = 0  # round in which it last drafted

    @property
    def num_rows(self) -> int:
        """Positions whose states are known."""
        return self.unread[-1].stop if self.unread else len(self.features)


class HeadStates:
    """States of all requests of a head that reads `layers`; `fuse` makes features of them.

    `cache` holds the head's own keys and values, under the numbers of the requests.
    """

    def __init__(self, cache: PagedCache, layers: Sequence[int], fuse: Fuse) -> None:
        self.cache, self._layers, self._fuse = cache, tuple(layers), fuse
        self.requests: dict[int, KeptStates] = {}
        self._round = 0

    def start(self, request_id: int) -> None:
        """Open a request; nothing is known of it."""
        self.requests[request_id] = KeptStates()
        self.cache.open(request_id)

    def add(self, rows: HiddenRows) -> None:
        """Store new states of a request."""
        own = self.requests[rows.request_id]
        assert rows.start == own.num_rows, "a position is missing, or comes twice"
        own.unread.append(rows)
        if len(own.unread) >= _MAX_UNREAD:
            self.make_features([rows.request_id])

    def begin_round(self, request_ids: Iterable[int]) -> None:
        """A round in which these requests draft: none of them gives way to another one."""
        self._round += 1
        for request_id in request_ids:
            self.requests[request_id].used = self._round

    @torch.inference_mode()
    def make_features(self, request_ids: Sequence[int]) -> None:
        """Make features of all states that some requests have read, in one call."""
        unread = [(self.requests[one], rows) for one in request_ids for rows in self.requests[one].unread]
        if not unread:
            return
        states = unread[0][1].states
        if len(unread) > 1:
            states = {layer: torch.cat([rows.states[layer] for _, rows in unread]) for layer in self._layers}
        pieces = self._fuse(states).split_with_sizes([len(rows.tokens) for _, rows in unread])
        for (own, _), piece in zip(unread, pieces, strict=True):
            own.features.append(piece)
        for one in request_ids:
            self.requests[one].unread.clear()

    def features(self, request_id: int) -> StoredRows:
        """What was made of a request's states."""
        return self.requests[request_id].features

    def make_room(self, request_id: int, num_rows: int) -> bool:
        """Room for `num_rows` more rows of a request, with what others hold that do not draft in this round if need
        be; False if there is none.
        """
        if self.cache.reserve(request_id, num_rows):
            return True
        idle = [one for one, own in self.requests.items() if own.used < self._round and self.cache.length(one)]
        for one in sorted(idle, key=lambda one: self.requests[one].used):
            self.cache.rollback(one, 0)  # made again from its features when it drafts
            if self.cache.reserve(request_id, num_rows):
                return True
        return False

    def release(self, request_id: int) -> None:
        """Forget the states of a request; they come again."""
        self.cache.rollback(request_id, 0)
        self.requests[request_id] = KeptStates()

    def drop_computed(self) -> None:
        """Forget all keys and values, which other weights made; features stay."""
        for request_id in self.requests:
            self.cache.rollback(request_id, 0)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self.requests[request_id]
        self.cache.close(request_id)

    @torch.inference_mode()
    def exported(self, request_id: int, start: int, stop: int) -> Tensor:
        """Features [stop - start, D] of some positions, each of its own position alone."""
        self.make_features([request_id])
        return self.features(request_id).between(start, stop).clone()

    @torch.inference_mode()
    def adopt(self, request_id: int, blocks: Sequence[object]) -> None:
        """Begin a request with features that `exported` gave for the beginning of the same text."""
        for block in blocks:
            assert isinstance(block, Tensor)
            self.features(request_id).append(block)


class HeadDrafter:
    """What every drafter of a trained head answers alike."""

    keeps_answers = False  # see `base.FollowsText`

    @property
    def cache_bytes(self) -> int:
        """Memory of the head's own keys and values when they are full: it has none."""
        return 0

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`: none beside the target."""
        return ()

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: the chance that a position is drafted."""
        return product_of(spec, PROBABILITIES if spec.draft_probability == "auto" else {})

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Nothing: what was emitted comes as hidden states."""

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`: what was emitted comes as hidden states."""

    def reset(self) -> None:
        """See `base.Resets`: nothing outlives a request; the head's weights stay as they are, adapted ones too."""


class StatesDrafter(HeadDrafter):
    """A head with keys and values of its own, made from the states that `HeadStates` keeps."""

    _states: HeadStates

    @property
    def cache_bytes(self) -> int:
        """Memory of the head's own keys and values when they are full."""
        cache = self._states.cache
        return cache.capacity_tokens * cache.kv_bytes_per_token

    def release(self, request_id: int) -> None:
        """See `base.Releases`: the states come again."""
        self._states.release(request_id)

    def drop_computed(self) -> None:
        """See `base.AdaptableDrafter`: keys and values are made again from the features."""
        self._states.drop_computed()

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._states.finish(request_id)

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """See `base.PrefixStates`: features [stop - start, D], each of its own position alone."""
        return self._states.exported(request_id, start, stop)

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`."""
        self._states.adopt(request_id, blocks)


def twin_target(target: SharesWeights, twin: Callable[[LanguageModel], LanguageModel]) -> SharesWeights:
    """The twin of a head's target, for `base.ModelDrafter.fresh`."""
    found = twin(target)
    assert isinstance(found, SharesWeights)
    return found
