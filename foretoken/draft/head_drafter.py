"""What drafters of trained heads have in common: no model beside the target, and states in place of commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Verdict
from foretoken.draft.base import Feedback, product_of
from foretoken.draft.chain import PROBABILITIES
from foretoken.draft.head_states import HeadStates
from foretoken.model.interface import LanguageModel, SharesWeights


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
