"""Which requests take part in the next step, and with how many rows.

A request joins when its text fits beside what is running and a reserve stays free, not when its whole course would.
When running requests meet a full cache after all, the least urgent one gives its cache back and waits (preemption):
what was computed stays adoptable until its place is needed, and the rest is read again, up to the last token, whose row
is then a decode step like any other. So a preempted request draws and drafts what it would have drawn and drafted
undisturbed. All decisions are `control.queue`'s; here they are carried out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from foretoken.control.queue import (
    RowDemand,
    RowGrant,
    SchedulerConfig,
    Urgency,
    growth_tokens,
    may_join,
    reserve_tokens,
    urgency,
    within_budget,
    within_cache,
)
from foretoken.core import Batch, BatchEntry
from foretoken.engine.controller import DraftPlan
from foretoken.engine.prefix_sharing import PrefixSharing
from foretoken.engine.request import RequestState
from foretoken.model.interface import LanguageModel
from foretoken.verify import takes_trees

__all__ = ["Scheduler", "SchedulerConfig"]

_NOTHING = DraftPlan(0)


class Scheduler:
    """Serves the most urgent first, under the limits of `SchedulerConfig` and the target's cache.

    `preempted` and `num_recomputed_tokens` are those of the latest `schedule`. `alone` holds requests whose step
    raised, with the rounds that they had finished by then: until it is empty each of them runs by itself, the most
    urgent one first, until it has emitted.
    """

    def __init__(
        self,
        target: LanguageModel,
        config: SchedulerConfig,
        plan: Callable[[Sequence[RequestState]], Sequence[DraftPlan]],
        prefixes: PrefixSharing,
    ) -> None:
        self.target, self.config, self._plan, self._prefixes = target, config, plan, prefixes
        self.waiting: list[RequestState] = []  # most urgent first
        self.running: dict[int, RequestState] = {}
        self.preempted: list[RequestState] = []
        self.num_recomputed_tokens = 0
        self._urgency: dict[int, Urgency] = {}
        self.alone: dict[int, int] = {}
        self._joining: RequestState | None = None  # on its way from `waiting` to `running`
        self._lost: dict[int, int] = {}  # tokens that a preempted request had in the cache
        self._reclaim: Callable[[], None] | None = None  # takes back cache that is lent to background work

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        params = state.request.params
        self._urgency[state.request_id] = urgency(
            state.request_id, state.arrived_s, params.priority, params.deadline_s, self.config.aging_s
        )
        self._enqueue(state)

    def worst_case_tokens(self, state: RequestState) -> int:
        """Most cache a request can ever hold: guesses are clamped to what may still be emitted, so its whole course
        bounds them.

        Probes come on top as far as the whole cache has room for them; they also use what is meant for text yet to
        come.
        """
        spare = max(0, self.target.capacity_tokens - state.max_total_tokens)
        return self.target.footprint_tokens(state.max_total_tokens + min(state.request.spec.num_probe, spare))

    def schedule(self) -> Batch:
        """The next batch: requests that decode, then those that read the last of their prompt, then other chunks; each
        most urgent first.
        """
        self.preempted, self.num_recomputed_tokens = [], 0
        if self.alone:
            self._end_trials()
        self._admit()
        states = sorted(self.running.values(), key=self._key)
        plans = self._plans(states)
        asks = [self._ask(state, plan) for state, plan in zip(states, plans, strict=True)]
        grants = self._grants(states, asks)
        anchors: list[BatchEntry] = []
        lasts: list[BatchEntry] = []
        others: list[BatchEntry] = []
        for state, plan, ask, grant in zip(
            states, plans, asks, grants, strict=False
        ):  # the last ones may have been preempted
            if ask.decodes:
                anchors.append(self._entry(state, ask.held, grant, True, plan))
            elif grant.num_pending:
                # Drafts nothing: the first token is not delayed by a drafter's own prefill.
                whole = ask.held + grant.num_pending == len(state.tokens)
                (lasts if whole else others).append(self._entry(state, ask.held, grant, whole, plan))
        return Batch((*anchors, *lasts, *others))

    def remove(self, request_id: int) -> RequestState | None:
        """Take a request out, running or waiting; None if it is unknown."""
        self._lost.pop(request_id, None)
        self._urgency.pop(request_id, None)
        self.alone.pop(request_id, None)
        state = self.running.pop(request_id, None)
        if state is None:
            place = next((place for place, one in enumerate(self.waiting) if one.request_id == request_id), None)
            state = None if place is None else self.waiting.pop(place)
        return state

    def interrupted(self) -> list[RequestState]:
        """Whom a step that raised was serving, most urgent first: all who run, one that was about to join, and if there
        is none the next one.
        """
        states, joining = dict(self.running), self._joining
        self._joining = None
        if joining is not None:
            states[joining.request_id] = joining
        if not states and self.waiting:
            states[self.waiting[0].request_id] = self.waiting[0]
        return sorted(states.values(), key=self._key)

    def set_back(self, state: RequestState, alone: bool) -> None:
        """Queue one of those `interrupted` again, with nothing in the cache; if `alone`, to run by itself.

        What the cache held of it is not published: nobody knows what the step has done to it.
        """
        with suppress(KeyError):  # the step had not opened it yet, or was about to preempt it
            self._lost[state.request_id] = self.target.length(state.request_id)
            self.target.close(state.request_id)
        self.running.pop(state.request_id, None)
        if not any(one is state for one in self.waiting):
            self._enqueue(state)
        if alone:
            self.alone[state.request_id] = state.num_rounds

    def publish(self, state: RequestState) -> None:
        """Let later requests of the same tenant begin with what the target holds of a running request's text."""
        self._prefixes.publish(state)

    def borrow(self, num_tokens: int, reclaim: Callable[[], None]) -> bool:
        """Lend free cache until `give_back`; False if it is not to spare. `reclaim` must give it back: who asks for an
        answer comes first.
        """
        if self._reclaim is not None or self.waiting or not self._fits(num_tokens):
            return False
        self._reclaim = reclaim
        return True

    def give_back(self) -> None:
        """End the loan, if there is one."""
        self._reclaim = None

    def _key(self, state: RequestState) -> Urgency:
        return self._urgency[state.request_id]

    def _enqueue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=self._key)

    def _admit(self) -> None:
        """Let waiting requests join, strictly in their order: one that needs much room is not passed by others for
        ever.
        """
        while self.waiting and len(self.running) < self.config.max_batch_size:
            place = self._next_place()
            if place is None:
                return
            state = self._joining = self.waiting[place]
            self.target.open(state.request_id)
            del self.waiting[place]
            self.running[state.request_id] = state
            self._joining = None
            adopted = self._prefixes.adopt(state)
            self.num_recomputed_tokens += max(0, self._lost.pop(state.request_id, 0) - adopted)

    def _next_place(self) -> int | None:
        """Place in the queue of the request that may join now, if there is one."""
        if self.alone:
            return (
                None
                if self.running
                else next(place for place, state in enumerate(self.waiting) if state.request_id in self.alone)
            )
        state = self.waiting[0]
        if self._will_share(state):
            return None
        return None if self.running and not self._has_room(state) else 0

    def _end_trials(self) -> None:
        """Whoever ran by itself and has emitted makes room for the next one that has to."""
        for state in list(self.running.values()):
            if self.alone.get(state.request_id, state.num_rounds) < state.num_rounds:
                del self.alone[state.request_id]
                if self.alone:
                    self._preempt(state)

    def _has_room(self, state: RequestState) -> bool:
        """Whether a request may join, if need be after cache that was lent is back."""
        needed = self.target.footprint_tokens(len(state.tokens))
        if self._fits(needed):
            return True
        needed -= self._prefixes.shared_tokens(state)
        if self._reclaim is not None and not self._fits(needed):
            self._reclaim()
        return self._fits(needed)

    def _fits(self, num_tokens: int) -> bool:
        footprint, length = self.target.footprint_tokens, self.target.length
        owed = sum(
            footprint(len(state.tokens)) - footprint(length(state.request_id)) for state in self.running.values()
        )
        reserved = reserve_tokens(self.config, self.target.capacity_tokens) if self.running else 0
        return may_join(num_tokens, owed, reserved, self.target.num_free_tokens())

    def _will_share(self, state: RequestState) -> bool:
        """Whether a more urgent request is just reading a prompt that begins alike: then it is cheaper to wait for
        that.
        """
        return any(
            self._key(other) < self._key(state) and self._prefixes.can_wait_for(state, other)
            for other in self.running.values()
        )

    def _plans(self, states: Sequence[RequestState]) -> list[DraftPlan]:
        """What each may draft; nothing but for those that decode.

        No more guesses than can still be used: the round itself emits one token of the target's own. The first token is
        never drafted, also where the last chunk of the prompt is a single token and looks like a decode step:
        neighbours decide where chunks end, and must not change what a request draws.
        """
        anchors = [state for state in states if self._decodes(state)]
        given = {
            state.request_id: plan for state, plan in zip(anchors, self._plan(anchors) if anchors else (), strict=True)
        }
        plans = []
        for state in states:
            plan, most = given.get(state.request_id, _NOTHING), max(0, state.num_remaining - 1) if state.origins else 0
            plans.append(plan if plan.num_draft <= most else replace(plan, num_draft=most))
        return plans

    def _decodes(self, state: RequestState) -> bool:
        return self.target.length(state.request_id) == len(state.tokens) - 1

    def _ask(self, state: RequestState, plan: DraftPlan) -> RowDemand:
        """A request that has begun its answer reads all but its last token: that one's row is a decode step."""
        held = self.target.length(state.request_id)
        missing = len(state.tokens) - held
        if missing == 1:
            return RowDemand(held, 1, True, plan.num_draft, self._num_probe(state, plan), _is_fixed(state))
        return RowDemand(held, missing - bool(state.origins), False)

    def _grants(self, states: list[RequestState], asks: list[RowDemand]) -> list[RowGrant]:
        """Rows for every request, most urgent first; the last ones are preempted until the rows of the others fit into
        the cache.
        """
        footprint = self.target.footprint_tokens
        while True:
            wanted = within_budget(asks[: len(states)], self.config)
            if growth_tokens(asks[: len(states)], wanted, footprint) <= self.target.num_free_tokens():
                return wanted
            self._gather(states)
            grants = within_cache(asks[: len(states)], wanted, self.target.num_free_tokens(), footprint)
            if grants is not None:
                return grants
            self._preempt(states.pop())

    def _gather(self, states: Sequence[RequestState]) -> None:
        """Take back cache that was lent, and what running requests keep of rows that came to nothing."""
        if self._reclaim is not None:
            self._reclaim()
        for state in states:
            self.target.rollback(state.request_id, self.target.length(state.request_id))

    def _preempt(self, state: RequestState) -> None:
        """Close a running request's sequence and queue it again; its text and all that came out of it stays."""
        self.publish(state)
        self._lost[state.request_id] = self.target.length(state.request_id)
        self.target.close(state.request_id)
        self._enqueue(state)
        del self.running[state.request_id]
        state.stats.num_preempted += 1
        self.preempted.append(state)

    def _entry(self, state: RequestState, start: int, grant: RowGrant, decodes: bool, plan: DraftPlan) -> BatchEntry:
        return BatchEntry(
            state.request,
            start,
            tuple(state.tokens[start : start + grant.num_pending]),
            decodes,
            grant.num_draft,
            state.processors,
            state.noise,
            plan.draft_probability,
            takes_trees(state.rule),
            grant.num_probe,
            self.target.max_context_tokens - len(state.tokens) if grant.num_probe else 0,
            plan.arm,
            _num_prompt_rows(state, start, grant.num_pending - decodes),
            next_token=None if decodes else state.tokens[start + grant.num_pending],
        )

    def _num_probe(self, state: RequestState, plan: DraftPlan) -> int:
        """Probes that fit behind the text and the guesses in the request's own course; none for a request that does not
        guess.

        Neighbours have no say in it: what probes find out changes later guesses, and so what a seed draws under most
        rules.
        """
        if not plan.num_draft or not state.request.spec.num_probe:
            return 0
        return max(
            0, min(state.request.spec.num_probe, self.worst_case_tokens(state) - len(state.tokens) - plan.num_draft)
        )


def _is_fixed(state: RequestState) -> bool:
    """Whether what a seed draws depends on how much is guessed, and how much is guessed on nothing but the request."""
    spec, params = state.request.spec, state.request.params
    open_ = "auto" in (spec.num_draft, spec.draft_probability)
    return params.seed is not None and state.rule not in ("greedy", "coupled") and not open_


def _num_prompt_rows(state: RequestState, start: int, num_rows: int) -> int:
    """Of `num_rows` rows from `start` on, how many are followed by prompt tokens whose log-probability is wanted and
    not known yet.
    """
    if state.request.params.prompt_logprobs is None or state.origins:
        return 0
    return max(0, start + num_rows - max(start, len(state.prompt_logprobs) - 1))
