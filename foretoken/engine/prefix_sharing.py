"""Requests begin with cached blocks of the target, as far as their drafters can do without hidden states of them."""

from __future__ import annotations

from foretoken.draft.hidden_states import HiddenStates
from foretoken.engine.request import RequestState
from foretoken.model.interface import LanguageModel, PrefixModel


class PrefixSharing:
    """The target's prefix cache, by request; every call does nothing for a target that has none."""

    def __init__(self, target: LanguageModel, hidden_states: HiddenStates) -> None:
        self._prefix = target if isinstance(target, PrefixModel) else None
        self._block_tokens = target.footprint_tokens(1)
        self._hidden_states = hidden_states

    def adopt(self, state: RequestState) -> int:
        """Begin a request that has just joined with cached blocks of its text; returns the number of tokens adopted."""
        if self._prefix is None or not _adopts(state):
            return 0
        request_id, tenant = state.request_id, state.request.params.tenant
        most = self._hidden_states.most_adoptable(request_id, state.tokens, tenant)
        num_tokens = self._prefix.adopt(request_id, state.tokens, tenant, most)
        self._hidden_states.adopted(request_id, state.tokens, tenant, num_tokens)
        return num_tokens

    def publish(self, state: RequestState) -> None:
        """Let later requests of the same tenant begin with what the target holds of a running request's text."""
        if self._prefix is not None:
            self._prefix.publish(state.request_id, state.tokens, state.request.params.tenant)
            self._hidden_states.publish(state.request_id, state.tokens, state.request.params.tenant)

    def shared_tokens(self, state: RequestState) -> int:
        """How many tokens a waiting request could adopt from blocks that running requests hold."""
        if self._prefix is None or not _adopts(state):
            return 0
        tenant = state.request.params.tenant
        most = self._hidden_states.most_adoptable(state.request_id, state.tokens, tenant)
        return self._prefix.shared_tokens(state.tokens, tenant, most)

    def can_wait_for(self, state: RequestState, other: RequestState) -> bool:
        """Whether a waiting request could adopt blocks that running request `other` is about to compute."""
        size, num_tokens = self._block_tokens, len(state.tokens)
        return (
            self._prefix is not None
            and _adopts(state)
            and num_tokens > size
            and other.tokens[:size] == state.tokens[:size]
            and other.request.params.tenant == state.request.params.tenant
            and self._prefix.length(other.request_id) < min(len(other.tokens) - 1, num_tokens - 1) // size * size
            and self._hidden_states.shares_states(state.request_id, other.request_id)
        )


def _adopts(state: RequestState) -> bool:
    """Whether a request may begin with cached blocks: not one that wants log-probabilities of every prompt token."""
    return bool(state.provenance) or state.request.params.prompt_logprobs is None
