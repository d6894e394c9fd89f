"""Which requests take part in the next step, and with how many rows.

A request is admitted when its longest possible course fits beside those already running, so a running request never
meets a full cache. Long prompts are taken in chunks, so that running requests keep emitting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foretoken.core import Batch, BatchEntry
from foretoken.engine.controller import DraftPlan
from foretoken.engine.request import RequestState
from foretoken.model.interface import LanguageModel, PrefixModel
from foretoken.verify import takes_trees


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step: requests, and prompt tokens taken per step over all requests."""

    max_batch_size: int = 16
    max_prompt_tokens: int = 512


class Scheduler:
    """First come, first served, under the limits of `SchedulerConfig` and the target's cache."""

    def __init__(self, target: LanguageModel, config: SchedulerConfig, plan: Callable[[Sequence[RequestState]], Sequence[DraftPlan]]) -> None:
        self.target, self.config, self._plan = target, config, plan
        self._prefix = target if isinstance(target, PrefixModel) else None
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}
        self._promised_tokens: dict[int, int] = {}  # worst-case cache use of each running request
        self._loan: tuple[int, Callable[[], None]] | None = None  # cache lent to background work, and how to get it back

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        self.waiting.append(state)

    def worst_case_tokens(self, state: RequestState) -> int:
        """Most cache a request can ever hold: guesses are clamped to what may still be emitted, so its whole course bounds them.

        Probes come on top as far as the whole cache has room for them; they also use what was promised for text yet to come.
        """
        spare = max(0, self.target.capacity_tokens - state.max_total_tokens)
        return self.target.footprint_tokens(state.max_total_tokens + min(state.request.spec.num_probe, spare))

    def schedule(self) -> Batch:
        """The next batch: every running request that decodes, then prompt chunks, in order of arrival."""
        self._admit()
        anchors: list[RequestState] = []
        lasts: list[BatchEntry] = []
        prompts: list[BatchEntry] = []
        budget = self.config.max_prompt_tokens
        for state in self.running.values():
            start = self.target.length(state.request_id)
            missing = len(state.tokens) - start
            if missing == 1:
                anchors.append(state)
            elif budget > 0:
                chunk = tuple(state.tokens[start : start + min(missing, budget)])
                budget -= len(chunk)
                whole = len(chunk) == missing
                # Drafts nothing: the first token is not delayed by a drafter's own prefill.
                (lasts if whole else prompts).append(self._entry(state, start, chunk, whole, DraftPlan(0)))
        return Batch((*self._decode_entries(anchors), *lasts, *prompts))

    def remove(self, request_id: int) -> RequestState | None:
        """Take a request out, running or waiting; None if it is unknown."""
        self._promised_tokens.pop(request_id, None)
        state = self.running.pop(request_id, None)
        if state is None:
            state = next((s for s in self.waiting if s.request_id == request_id), None)
            if state is not None:
                self.waiting.remove(state)
        return state

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_batch_size:
            if self._will_share(self.waiting[0]):
                return
            needed = self.worst_case_tokens(self.waiting[0])
            if self._loan is not None and not self._fits(needed):
                self._loan[1]()  # who is waiting comes before work in the background
            if self.running and not self._fits(needed):
                return
            state = self.waiting.popleft()
            self.target.open(state.request_id)
            if self._prefix is not None and state.request.params.prompt_logprobs is None:
                self._prefix.adopt(state.request_id, state.tokens, state.request.spec.tenant)
            self.running[state.request_id] = state
            self._promised_tokens[state.request_id] = needed

    def publish(self, state: RequestState) -> None:
        """Let later requests of the same tenant begin with what the target holds of a running request's text."""
        if self._prefix is not None:
            self._prefix.publish(state.request_id, state.tokens, state.request.spec.tenant)

    def _will_share(self, state: RequestState) -> bool:
        """Whether a running request is just reading a prompt that begins alike: then it is cheaper to wait for that."""
        if self._prefix is None:
            return False
        size = self.target.footprint_tokens(1)
        head = state.tokens[:size]
        return len(state.tokens) > size and any(
            other.tokens[:size] == head
            and other.request.spec.tenant == state.request.spec.tenant
            and self.target.length(other.request_id) < min(len(other.tokens) - 1, len(state.tokens) - 1) // size * size
            for other in self.running.values()
        )

    def borrow(self, num_tokens: int, reclaim: Callable[[], None]) -> bool:
        """Lend cache that no request was promised until `give_back`; False if there is not so much. `reclaim` must give it back."""
        if self._loan is not None or self.waiting or not self._fits(num_tokens):
            return False
        self._loan = (num_tokens, reclaim)
        return True

    def give_back(self) -> None:
        """End the loan, if there is one."""
        self._loan = None

    def _fits(self, num_tokens: int) -> bool:
        lent = 0 if self._loan is None else self._loan[0]
        return sum(self._promised_tokens.values()) + lent + num_tokens <= self.target.capacity_tokens

    def _entry(self, state: RequestState, start: int, pending: tuple[int, ...], decodes: bool, plan: DraftPlan) -> BatchEntry:
        num_probe = self._num_probe(state, plan)
        return BatchEntry(
            state.request,
            start,
            pending,
            decodes,
            plan.num_draft,
            state.processors,
            state.noise,
            plan.draft_probability,
            takes_trees(state.rule),
            num_probe,
            self.target.max_context_tokens - len(state.tokens) if num_probe else 0,
            plan.arm,
        )

    def _num_probe(self, state: RequestState, plan: DraftPlan) -> int:
        """Probes that fit behind the text and the guesses in what the request was promised; none for a request that does not guess.

        Neighbours have no say in it: what probes find out changes later guesses, and so what a seed draws under most rules.
        """
        if not plan.num_draft:
            return 0
        return max(0, min(state.request.spec.num_probe, self._promised_tokens[state.request_id] - len(state.tokens) - plan.num_draft))

    def _decode_entries(self, states: Sequence[RequestState]) -> list[BatchEntry]:
        """No more guesses than can still be used: the round itself emits one token of the target's own.

        The first token is never drafted, also where the last chunk of the prompt is a single token and looks like a
        decode step: neighbours decide where chunks end, and must not change what a request draws.
        """
        entries = []
        for state, plan in zip(states, self._plan(states) if states else (), strict=True):
            most = state.num_remaining - 1 if state.origins else 0
            plan = replace(plan, num_draft=max(0, min(plan.num_draft, most)))
            entries.append(self._entry(state, len(state.tokens) - 1, (state.tokens[-1],), True, plan))
        return entries
