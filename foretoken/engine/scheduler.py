"""Which requests run in a step, in which order, with how many rows: the queue over the target's cache and prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from foretoken.control.candidates import NO_DRAFT, DraftBudget, max_useful_draft
from foretoken.control.queue import Queue, Rows, SchedulerConfig, urgency
from foretoken.core import Batch, BatchEntry
from foretoken.draft.hidden_states import HiddenStates
from foretoken.engine.recovery import MemoryPressure
from foretoken.engine.request import RequestState
from foretoken.model.interface import LanguageModel, PrefixModel
from foretoken.verify import takes_trees

__all__ = ["Scheduler", "SchedulerConfig"]

FirstBlock = tuple[str, tuple[int, ...]]


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

    def first_block(self, state: RequestState) -> FirstBlock | None:
        """The tenant and first block of a text: who share blocks have both in common. None for a text too short."""
        if self._prefix is None or len(state.tokens) <= self._block_tokens:
            return None
        return state.request.params.tenant, tuple(state.tokens[: self._block_tokens])

    def is_reading(self, state: RequestState) -> bool:
        """Whether a running request is about to compute whole blocks."""
        assert self._prefix is not None
        size = self._block_tokens
        return self._prefix.length(state.request_id) < (len(state.tokens) - 1) // size * size

    def can_wait_for(self, state: RequestState, other: RequestState) -> bool:
        """Whether a waiting request could adopt blocks that `other`, of the same `first_block`, is about to compute."""
        size, num_tokens = self._block_tokens, min(len(state.tokens), len(other.tokens))
        return (
            self._prefix is not None
            and _adopts(state)
            and self._prefix.length(other.request_id) < (num_tokens - 1) // size * size
            and self._hidden_states.shares_states(state.request_id, other.request_id)
        )


def _adopts(state: RequestState) -> bool:
    """Whether a request may begin with cached blocks: not one that wants log-probabilities of every prompt token."""
    return bool(state.provenance) or state.request.params.prompt_logprobs is None


class Scheduler(Queue[RequestState]):
    """Adds to the queue what a real cache can do: adopting prefixes, lending, and steps that broke down.

    `preempted` and `num_recomputed_tokens` are those of the latest step. `alone` holds requests whose step raised, with
    the rounds that they had finished by then: until it is empty each of them runs by itself, the most urgent one first,
    until it has emitted.
    """

    def __init__(self, target: LanguageModel, config: SchedulerConfig, prefixes: PrefixSharing) -> None:
        super().__init__(target, config)
        self.target, self._prefixes = target, prefixes
        self.num_recomputed_tokens = 0
        self.alone: dict[int, int] = {}
        self.pressure = MemoryPressure()
        self._joining: RequestState | None = None  # on its way from `waiting` to `running`
        self._readers: dict[FirstBlock, list[RequestState]] | None = None  # that run; known while requests join
        self._lost: dict[int, int] = {}  # tokens that a preempted request had in the cache
        self._reclaim: Callable[[], None] | None = None  # takes back cache that is lent to background work

    def add(self, state: RequestState) -> None:
        """Queue a new request."""
        params = state.request.params
        self.enqueue(
            state, urgency(state.request_id, state.arrived_s, params.priority, params.deadline_s, self.config.aging_s)
        )

    def worst_case_tokens(self, state: RequestState) -> int:
        """Most cache a request can ever hold: draft tokens are clamped to what may still be emitted, so its length
        bounds it.

        Probes come on top as far as the whole cache has room for them; they also use what is meant for text yet to
        come.
        """
        spare = max(0, self.target.capacity_tokens - state.max_total_tokens)
        return self.target.footprint_tokens(state.max_total_tokens + min(state.request.spec.num_probe, spare))

    def make_way(self) -> None:
        """Begin a step; a request that ran by itself and has emitted makes room for the next one that has to."""
        self.num_recomputed_tokens = 0
        self.pressure.begin_step(self.config)
        for state in list(self.running.values()) if self.alone else ():
            if self.alone.get(state.request_id, state.num_rounds) < state.num_rounds:
                del self.alone[state.request_id]
                if self.alone:
                    self.preempt(state)

    def admit(self) -> None:
        """See `Queue.admit`."""
        try:
            super().admit()
        finally:
            self._readers = None

    def schedule(self, budgets: Mapping[int, DraftBudget]) -> Batch:
        """The next batch: requests that decode, then those that read the last of their prompt, then other chunks.

        Each group most urgent first. `budgets` are those of requests that decode, by number.
        """
        usable = {request_id: self._usable(self.running[request_id], own) for request_id, own in budgets.items()}
        anchors: list[BatchEntry] = []
        lasts: list[BatchEntry] = []
        others: list[BatchEntry] = []
        for state, rows in self.rows(usable):
            budget = usable.get(state.request_id, NO_DRAFT)
            if rows.decodes:
                anchors.append(self._entry(state, rows, True, budget))
            elif rows.num_pending:
                # Drafts nothing: the first token is not delayed by a drafter's own prefill.
                whole = rows.held + rows.num_pending == len(state.tokens)
                (lasts if whole else others).append(self._entry(state, rows, whole, budget))
        return Batch((*anchors, *lasts, *others))

    def rows(self, budgets: Mapping[int, DraftBudget]) -> list[tuple[RequestState, Rows]]:
        """See `Queue.rows`; after a step that was too large for the memory prompts are read in smaller pieces."""
        own = self.config
        self.config = self.pressure.narrowed(own)
        try:
            return super().rows(budgets)
        finally:
            self.config = own

    def remove(self, request_id: int) -> RequestState | None:
        """Take a request out, running or waiting; None if it is unknown."""
        self._lost.pop(request_id, None)
        self.alone.pop(request_id, None)
        return super().remove(request_id)

    def interrupted(self) -> list[RequestState]:
        """The requests of a step that raised, most urgent first: all that run, one that was about to join, and if there
        is none the next one.
        """
        states, joining = dict(self.running), self._joining
        self._joining = None
        if joining is not None:
            states[joining.request_id] = joining
        if not states and self.waiting:
            states[self.waiting[0].request_id] = self.waiting[0]
        return sorted(states.values(), key=self.key)

    def set_back(self, state: RequestState, alone: bool) -> None:
        """Queue one of those `interrupted` again, with nothing in the cache; if `alone`, to run by itself.

        What the cache held of it is not published: nobody knows what the step has done to it.
        """
        with suppress(KeyError):  # the step had not opened it yet, or was about to preempt it
            self._lost[state.request_id] = self.target.length(state.request_id)
            self.target.close(state.request_id)
        self.running.pop(state.request_id, None)
        if not any(one is state for one in self.waiting):
            self.enqueue(state)
        if alone:
            self.alone[state.request_id] = state.num_rounds

    def publish(self, state: RequestState) -> None:
        """Let later requests of the same tenant begin with what the target holds of a running request's text."""
        self._prefixes.publish(state)

    def borrow(self, num_tokens: int, reclaim: Callable[[], None]) -> bool:
        """Lend free cache until `give_back`; False if there is none to spare. `reclaim` must give it back: user
        requests take precedence over background work.
        """
        if self._reclaim is not None or self.waiting or not self.fits(num_tokens):
            return False
        self._reclaim = reclaim
        return True

    def give_back(self) -> None:
        """End the loan, if there is one."""
        self._reclaim = None

    def next_place(self) -> int | None:
        """See `Queue.next_place`; while some must run alone, one of them."""
        if self.alone:
            if self.running:
                return None
            return next(place for place, state in enumerate(self.waiting) if state.request_id in self.alone)
        most = self.pressure.max_requests
        if most is not None and len(self.running) >= most:
            return None
        state = self.waiting[0]
        if self._will_share(state):
            return None
        return None if self.running and not self._has_room(state) else 0

    def join(self, place: int) -> None:
        """See `Queue.join`; a prefix that the cache holds already is adopted."""
        state = self._joining = self.waiting[place]
        super().join(place)
        self._joining = None
        adopted = self._prefixes.adopt(state)
        if self._readers is not None:
            self._note_reader(state)
        self.num_recomputed_tokens += max(0, self._lost.pop(state.request_id, 0) - adopted)

    def gather(self, requests: list[RequestState]) -> None:  # type: ignore[override]
        """Take back cache that was lent, and what running requests keep of rows that came to nothing."""
        if self._reclaim is not None:
            self._reclaim()
        for state in requests:
            self.target.rollback(state.request_id, self.target.length(state.request_id))

    def preempt(self, request: RequestState) -> None:
        """See `Queue.preempt`; its blocks stay findable until they are needed."""
        self.publish(request)
        self._lost[request.request_id] = self.target.length(request.request_id)
        super().preempt(request)
        request.stats.num_preempted += 1

    def _has_room(self, state: RequestState) -> bool:
        """Whether a request may join, if need be after cache that was lent is back."""
        needed = self._footprint(state)
        if self.fits(needed):
            return True
        needed -= self._prefixes.shared_tokens(state)
        if self._reclaim is not None and not self.fits(needed):
            self._reclaim()
        return self.fits(needed)

    def _will_share(self, state: RequestState) -> bool:
        """Whether a more urgent request is just reading a prompt that begins alike: it is cheaper to wait for that."""
        first_block = self._prefixes.first_block(state)
        if first_block is None:
            return False
        if self._readers is None:
            self._readers = {}
            for one in self.running.values():
                self._note_reader(one)
        return any(
            self.key(other) < self.key(state) and self._prefixes.can_wait_for(state, other)
            for other in self._readers.get(first_block, ())
        )

    def _note_reader(self, state: RequestState) -> None:
        """Enter a running request into `_readers`, if others could wait for what it reads."""
        assert self._readers is not None
        first_block = self._prefixes.first_block(state)
        if first_block is not None and self._prefixes.is_reading(state):
            self._readers.setdefault(first_block, []).append(state)

    def _usable(self, state: RequestState, budget: DraftBudget) -> DraftBudget:
        """No more draft tokens than can still be used, and the probes that fit.

        The first token is never drafted, also where the last chunk of the prompt is a single token and looks like a
        decode step: neighbours decide where chunks end, and must not change what a request draws.
        """
        if not budget.num_draft:
            return budget
        max_draft = max_useful_draft(state.num_remaining) if state.has_emitted else 0
        if self.pressure.is_tight and not budget.is_fixed:
            max_draft = 0
        num_draft = min(budget.num_draft, max_draft)
        num_probe = self._num_probe(state, budget.num_probe, num_draft)
        if (num_draft, num_probe) == (budget.num_draft, budget.num_probe):
            return budget
        return budget._replace(num_draft=num_draft, num_probe=num_probe)

    def _entry(self, state: RequestState, rows: Rows, decodes: bool, budget: DraftBudget) -> BatchEntry:
        start = rows.held
        return BatchEntry(
            request=state.request,
            start=start,
            pending=tuple(state.tokens[start : start + rows.num_pending]),
            decodes=decodes,
            num_draft=rows.num_draft,
            processors=state.processors,
            noise=state.noise,
            draft_probability=budget.draft_probability,
            takes_trees=takes_trees(state.rule),
            num_probe=rows.num_probe,
            probe_depth=self.target.max_context_tokens - len(state.tokens) if rows.num_probe else 0,
            option=budget.option,
            num_prompt_rows=_num_prompt_rows(state, start, rows.num_pending - decodes),
            next_token=None if decodes else state.tokens[start + rows.num_pending],
        )

    def _num_probe(self, state: RequestState, wanted: int, num_draft: int) -> int:
        """Of `wanted` probes those that fit behind text and draft tokens within the request's length; none without a
        draft.

        Neighbours have no say in it: what probes find changes later draft tokens, and so what a seed draws under most
        rules.
        """
        if not num_draft or not wanted:
            return 0
        room = self.worst_case_tokens(state) - len(state.tokens) - num_draft
        return max(0, min(wanted, room))


def _num_prompt_rows(state: RequestState, start: int, num_rows: int) -> int:
    """Of `num_rows` rows from `start` on, those followed by prompt tokens whose log-probability is still wanted."""
    if state.request.params.prompt_logprobs is None or state.has_emitted:
        return 0
    return max(0, start + num_rows - max(start, len(state.prompt_logprobs) - 1))
