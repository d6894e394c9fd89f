"""What drafters of trained heads share: no model beside the target, and its hidden states in place of commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Request, Verdict
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
    """A head with keys and values of its own, in `cache`, made from the states of `layers` that it reads; `fuse` makes
    features of them. `cache` holds them under the numbers of the requests.
    """

    def __init__(self, cache: PagedCache, layers: Sequence[int], fuse: Fuse) -> None:
        self.cache, self._layers, self._fuse = cache, tuple(layers), fuse
        self.kept: dict[int, KeptStates] = {}  # by request
        self.num_read_tokens = 0  # see `base.Reads`
        self._round = 0

    @property
    def cache_bytes(self) -> int:
        """Memory of the head's own keys and values when they are full."""
        return self.cache.capacity_tokens * self.cache.kv_bytes_per_token

    def hidden_layers(self) -> tuple[int, ...]:
        """See `base.HiddenStateReader`."""
        return self._layers

    def start(self, request: Request) -> None:
        """Open a request; nothing is known of it."""
        self.kept[request.request_id] = KeptStates()
        self.cache.open(request.request_id)

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`: the states are stored as they are."""
        for one in rows:
            own = self.kept[one.request_id]
            assert one.start == own.num_rows, "a position is missing, or comes twice"
            own.unread.append(one)
            if len(own.unread) >= _MAX_UNREAD:
                self.make_features([one.request_id])

    def begin_round(self, request_ids: Iterable[int]) -> None:
        """A round in which these requests draft: none of them gives way to another one."""
        self.num_read_tokens = 0
        self._round += 1
        for request_id in request_ids:
            self.kept[request_id].used = self._round

    @torch.inference_mode()
    def make_features(self, request_ids: Sequence[int]) -> None:
        """Make features of all states that some requests have read, in one call."""
        unread = [(self.kept[one], rows) for one in request_ids for rows in self.kept[one].unread]
        if not unread:
            return
        states = unread[0][1].states
        if len(unread) > 1:
            states = {layer: torch.cat([rows.states[layer] for _, rows in unread]) for layer in self._layers}
        pieces = self._fuse(states).split_with_sizes([len(rows.tokens) for _, rows in unread])
        for (own, _), piece in zip(unread, pieces, strict=True):
            own.features.append(piece)
        for one in request_ids:
            self.kept[one].unread.clear()

    def make_room(self, request_id: int, num_rows: int) -> bool:
        """Room for `num_rows` more rows of a request, with what others hold that do not draft in this round if need
        be; False if there is none.
        """
        if self.cache.reserve(request_id, num_rows):
            return True
        idle = [one for one, own in self.kept.items() if own.used < self._round and self.cache.length(one)]
        for one in sorted(idle, key=lambda one: self.kept[one].used):
            self.cache.rollback(one, 0)  # made again from its features when it drafts
            if self.cache.reserve(request_id, num_rows):
                return True
        return False

    def release(self, request_id: int) -> None:
        """See `base.Releases`: the states come again."""
        self.cache.rollback(request_id, 0)
        self.kept[request_id] = KeptStates()

    def drop_computed(self) -> None:
        """See `base.AdaptableDrafter`: keys and values are made again from the features."""
        for request_id in self.kept:
            self.cache.rollback(request_id, 0)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self.kept[request_id]
        self.cache.close(request_id)

    @torch.inference_mode()
    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """See `base.PrefixStates`: features [stop - start, D], each of its own position alone."""
        self.make_features([request_id])
        return self.kept[request_id].features.between(start, stop).clone()

    @torch.inference_mode()
    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`."""
        for block in blocks:
            assert isinstance(block, Tensor)
            self.kept[request_id].features.append(block)


def twin_target(target: SharesWeights, twin: Callable[[LanguageModel], LanguageModel]) -> SharesWeights:
    """The twin of a head's target, for `base.ModelDrafter.fresh`."""
    found = twin(target)
    assert isinstance(found, SharesWeights)
    return found
