"""The loop. `Engine.step` is nine calls, from `admit` to `emit`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.candidates import DraftBudget, PreviewAsk, Previews, RequestView
from foretoken.control.chooser import Chooser
from foretoken.control.cost import priors_of
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.core import Batch, BatchEntry, Draft, StepOutput, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.group import DrafterGroup, option_kind
from foretoken.engine.admission import Admission, end_tokens
from foretoken.engine.emission import emit, fail, note_prompt
from foretoken.engine.from_logits import verify_rows
from foretoken.engine.recovery import Faults, engine_error, recover
from foretoken.engine.request import PreparedRequest, RequestState
from foretoken.engine.runner import Runner, TargetOutput, uniforms_of
from foretoken.engine.scheduler import PrefixSharing, Scheduler
from foretoken.engine.stats import EngineStats
from foretoken.engine.step_threads import StepThreads
from foretoken.engine.time_attribution import book, charge, gain
from foretoken.engine.views import budget_of, fixed_budget, next_entry, outcome_of, view_of, why_none
from foretoken.engine.watch import RoundView, StepClock, Watcher, sees_rounds, show_round
from foretoken.errors import EngineError, ForetokenError, RankError
from foretoken.machine.process import keep_freed_memory
from foretoken.model.interface import LanguageModel, NeedsEqualThreads
from foretoken.plan.profile import Curve, Profile
from foretoken.text.tokenizer import Tokenizer
from foretoken.verify import GREEDY


class Engine:
    """Serves many requests with one target; every request keeps its own drafter, rule and sampling."""

    def __init__(
        self,
        target: LanguageModel,
        drafters: DrafterGroup,
        tokenizer: Tokenizer | None = None,
        limits: SchedulerConfig | None = None,
        eos_token_ids: Sequence[int] | None = None,
        routing: RoutingRules | None = None,
    ) -> None:
        if target.device.type == "cpu":
            keep_freed_memory()
        self.target, self.drafters = target, drafters
        self.runner, self.chooser = Runner(target), Chooser(time.perf_counter, routing)
        adapts = target.device.type == "cpu" and not isinstance(target, NeedsEqualThreads)
        self.threads = StepThreads(adapts, config=self.chooser.config.threads)
        self.stats = EngineStats()
        self.faults = Faults(self.stats)
        prefixes = PrefixSharing(target, drafters.hidden_states)
        self.scheduler = Scheduler(target, limits or SchedulerConfig(), prefixes)
        ends = end_tokens(target, tokenizer) if eos_token_ids is None else eos_token_ids
        self.admission = Admission(target, tokenizer, ends)
        self.states: dict[int, RequestState] = {}
        self._views: list[RequestView] = []  # of the requests that decode in this step
        self.watchers: list[Watcher] = []
        self._ids = itertools.count()
        self.clock = StepClock()
        self._outputs: list[StepOutput] = []  # emitted and not returned yet
        self._failed_drafting: set[int] = set()  # requests whose drafter failed in the last step
        self._is_stepping = False
        self._leaving: list[int] = []  # requests that were aborted while a step ran

    def seed(self, profile: Profile, specs: Mapping[str, SpecConfig]) -> None:
        """Begin with the costs of a profile; `specs` are what its drafters, by name, are in this engine."""
        rows, curves = priors_of(profile)
        known: dict[Hashable, Curve] = {
            option_kind(spec): curves[name] for name, spec in specs.items() if name in curves
        }
        self.chooser.seed(rows, known)

    def step(self) -> list[StepOutput]:
        """Advance every running request by one round; what each of them emitted. Nothing happens when there is no work.

        A call that raises costs no request that can go on without it (`recovery`); interrupts go through, and nothing
        is lost by them.

        Raises:
            RankError: a process that holds a part of the target is gone; the requests of the step have failed.
        """
        if self._is_stepping:
            raise EngineError("a step was asked for while one runs: watchers may not run steps")
        self._is_stepping = True
        try:
            if self.has_work:
                decoding = self._admit()
                previews = self._preview(decoding)
                batch = self._schedule(decoding, previews)
                draft = self._propose(batch)
                target = self._forward(batch, draft)
                verdict = self._verify(batch, draft, target)
                self._commit(batch, draft, target, verdict)
                self._observe(batch, draft, verdict)
                self._emit(batch, draft, target, verdict)
        except BaseException as error:
            recover(self, error)
            if not isinstance(error, Exception) or isinstance(error, RankError):
                raise
        finally:
            self.threads.end()
            self._is_stepping = False
        for request_id in self._leaving:
            self.abort(request_id)
        self._leaving.clear()
        return self.take_outputs()

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Prepare a request and queue it, see `enqueue`.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run; nothing was queued.
            EngineError: see `enqueue`.
        """
        return self.enqueue(self.admission.prepare(prompt_ids, params, spec))

    def enqueue(self, prepared: PreparedRequest) -> RequestState:
        """Queue a prepared request; the returned state carries its number and, as it runs, its tokens.

        Raises:
            EngineError: something broke on the way; nothing was queued.
        """
        state = prepared.state(next(self._ids))
        try:
            self.drafters.start(state.request)
            self.scheduler.add(state)
            self._enter(state)
        except BaseException as error:
            self._withdraw(state)
            if isinstance(error, ForetokenError) or not isinstance(error, Exception):
                raise
            raise engine_error("the request could not be started", error) from error
        return state

    def abort(self, request_id: int) -> None:
        """Drop a request, at once or after the step that runs; ignore an unknown one: it may just have finished."""
        if self._is_stepping:
            self._leaving.append(request_id)
            return
        state = self.states.get(request_id)
        if state is not None:
            state.finish_reason = state.finish_reason or "abort"
            self.release(state)

    def fail(self, state: RequestState, error: Exception) -> None:
        """End one request with an error; what it emitted before stays."""
        self._outputs.append(fail(state, error))
        self.release(state)

    def take_outputs(self) -> list[StepOutput]:
        """What was emitted and not returned yet: not empty after an interrupted step."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        """Drop every request and let the watchers finish."""
        for request_id in list(self.states):
            self.abort(request_id)
        for watcher in self.watchers:
            with self.faults.contained(f"closing the observer {type(watcher).__name__}", "it is left open"):
                watcher.close()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.states)

    def _enter(self, state: RequestState) -> None:
        """Count a request that was queued, and tell the watchers."""
        self.states[state.request_id] = state
        state.stats.num_prompt_tokens = len(state.request.prompt_ids)
        self.stats.num_prompt_tokens += len(state.request.prompt_ids)
        self.stats.num_submitted += 1
        self._gauge()
        self.faults.watch(self.watchers, lambda watcher: watcher.begin(state))

    def _withdraw(self, state: RequestState) -> None:
        """Take back a request that could not be queued."""
        if state.request_id in self.states:  # interrupted at the end of it
            self.abort(state.request_id)
            return
        self.scheduler.remove(state.request_id)
        refused = "it may keep what it holds of a request that was refused"
        with self.faults.contained("a drafter", refused), suppress(KeyError):  # not every drafter need have begun
            self.drafters.finish(state.request)

    def _admit(self) -> list[RequestState]:
        """Let waiting requests join; those that decode next."""
        self.clock = StepClock(began=time.perf_counter())
        try:
            self.scheduler.admit()
        except BaseException:  # some may have been preempted before it raised
            self._count_preempted()
            raise
        return self.scheduler.decoding()

    def _preview(self, decoding: Sequence[RequestState]) -> Previews | None:
        """What drafters show before anything is chosen; None if the chooser raised."""
        now_s, asks, failed = self.chooser.clock(), list[PreviewAsk](), False
        self._views = [view_of(state, self.drafters, now_s, self.chooser.routing) for state in decoding]
        try:
            asks = self.chooser.begin(self._views)
        except Exception as error:  # noqa: BLE001 - plain decoding needs no chooser
            self.faults.tell("the controller", error, "this step makes no draft tokens that are left to it")
            failed = True
        wanted = {ask.request_id for ask in asks}
        entries = {state.request_id: next_entry(state) for state in decoding if state.request_id in wanted}
        previews = self.drafters.preview(asks, entries)
        self.clock.preview_s = previews.seconds
        return None if failed else previews

    def _schedule(self, decoding: Sequence[RequestState], previews: Previews | None) -> Batch:
        try:
            batch = self.scheduler.schedule(self._budgets(decoding, previews))
        finally:
            self._views = []
            self._count_preempted()
        for state in self.scheduler.preempted:
            self.drafters.release(state.request)
        self.threads.begin(batch.only_decodes, self.clock.began)
        self.clock.scheduled = time.perf_counter()
        return batch

    def _budgets(self, decoding: Sequence[RequestState], previews: Previews | None) -> dict[int, DraftBudget]:
        """What each may draft; if the chooser raises, what callers set themselves."""
        if previews is not None:
            try:
                budgets = self.chooser.plan(self._views, previews)
                return {
                    state.request_id: budget_of(state, budget, self.drafters)
                    for state, budget in zip(decoding, budgets, strict=True)
                }
            except Exception as error:  # noqa: BLE001 - plain decoding needs no chooser
                self.faults.tell("the controller", error, "this step makes no draft tokens that are left to it")
        return {state.request_id: fixed_budget(state, self.drafters) for state in decoding if state.has_emitted}

    def _count_preempted(self) -> None:
        self.stats.num_preempted += len(self.scheduler.preempted)
        self.stats.num_recomputed_tokens += self.scheduler.num_recomputed_tokens
        self._gauge()

    def _propose(self, batch: Batch) -> Draft:
        draft = self.drafters.propose(batch)
        self.clock.proposed = time.perf_counter()
        return draft

    def _forward(self, batch: Batch, draft: Draft) -> TargetOutput:
        target = self.runner.forward(batch, draft, self.drafters.taps(batch))
        self.clock.forwarded = time.perf_counter()
        return target

    def _verify(self, batch: Batch, draft: Draft, target: TargetOutput) -> Verdict:
        entries = batch.decoding
        rules = [self.states[entry.request.request_id].rule for entry in entries]
        if all(rule == GREEDY.name for rule in rules):
            verdict = GREEDY.verify_best(draft, target.best)
        else:
            verdict = verify_rows(draft, target, uniforms_of(batch, draft, target, rules), rules)
        self.clock.verified = time.perf_counter()
        return verdict

    def _commit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        for b, entry in enumerate(batch.decoding):
            self.target.commit(entry.request.request_id, len(entry.pending), verdict.paths[b])
        for entry in batch.entries[len(batch.decoding) :]:
            self.target.commit(entry.request.request_id, len(entry.pending))
        feedback = Feedback(
            logits=target.processed,
            rows=tuple(range(draft.num_rows)),
            taps=target.taps,
            probe_logits=target.probe_logits,
            probe_rows=tuple(range(sum(draft.probe_lengths))),
            prompt_taps=target.prompt_taps,
        )
        proposing_s = sum(self.drafters.spent_s.values())
        self.drafters.commit(batch, draft, verdict, feedback)
        self.clock.taught_s = sum(self.drafters.spent_s.values()) - proposing_s
        for entry in batch.entries:
            if len(entry.pending) > 1:  # a piece of a prompt; drafters have read it by now
                self.scheduler.publish(self.states[entry.request.request_id])
        self.clock.committed = time.perf_counter()

    def _observe(self, batch: Batch, draft: Draft, verdict: Verdict) -> None:
        """Let the controller learn from the step, and share out the time it took."""
        clock, spent_s, states = (
            self.clock,
            self.drafters.spent_s,
            [self.states[entry.request.request_id] for entry in batch.entries],
        )
        self._failed_drafting.clear()
        self._count_failures()
        try:
            is_trial = self.threads.is_trial
            outcome = outcome_of(batch, draft, verdict, self.drafters, clock.target_s + clock.rule_s, is_trial)
            if batch.only_decodes:
                self.threads.observe(outcome.num_rows, outcome.target_s, self.chooser.policy.target_cost)
            self.chooser.observe(outcome)
        except Exception as error:  # noqa: BLE001 - answers do not depend on it
            self.faults.tell("the controller", error, "it learns nothing from this step")
        for entry, state in zip(batch.entries, states, strict=True):
            if not state.stats.started:
                self._count_start(state, entry)
        charge(
            batch,
            draft,
            verdict,
            clock,
            spent_s,
            self.drafters.keys,
            self.chooser.policy.target_cost,
            [state.stats for state in states],
            self.stats,
        )
        clock.observed = time.perf_counter()

    def _emit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        now, per_token = self.clock.observed, gain(batch, self.clock, self.chooser.policy.target_cost)
        for entry in batch.entries:
            if entry.request.params.prompt_logprobs is not None:
                error = note_prompt(self.states[entry.request.request_id], target)
                if error is not None:
                    self.fail(self.states[entry.request.request_id], error)
        needs_views = any(map(sees_rounds, self.watchers))
        for b, entry in enumerate(batch.decoding):
            state = self.states.get(entry.request.request_id)
            if state is None:
                continue  # it failed just now
            try:
                output = emit(state, draft, target, verdict, b, now, self.stats)
            except BaseException as error:  # interrupted half-way: its processors and its decoder cannot go back
                self.fail(state, engine_error("interrupted while the request emitted", error))
                raise
            self._outputs.append(output)
            if per_token is not None:
                plain_s = len(output.token_ids) * per_token[0]
                state.stats.count_gain(plain_s, per_token[1])
                self.stats.count_gain(plain_s, per_token[1])
            if needs_views:
                why = why_none(entry, draft.lengths[b], self.chooser, self._failed_drafting)
                view = RoundView(entry, draft, verdict, b, output, self.clock, why)
                self.faults.watch(self.watchers, partial(show_round, view=view))
            if state.finish_reason is not None:
                self.release(state)
        self.clock.emitted = time.perf_counter()
        with self.faults.contained("the controller", "it learns nothing of the host's part of this step"):
            self.chooser.observe_host(self.clock.host_s)
        self.stats.num_threads, self.stats.waiting = self.threads.current
        book(self.clock, self.stats)
        if self.watchers:
            self.faults.watch(self.watchers, lambda watcher: watcher.between_steps())

    def _count_start(self, state: RequestState, entry: BatchEntry) -> None:
        """A request takes part for the first time: it has waited, and the cache knew the beginning of its prompt."""
        state.stats.started, state.stats.queued_s, state.stats.num_cached_tokens = (
            True,
            self.clock.scheduled - state.arrived_s,
            entry.start,
        )
        self.stats.num_started += 1
        self.stats.queued_s += state.stats.queued_s
        self.stats.num_cached_tokens += entry.start

    def _count_failures(self) -> None:
        """Put what failed in drafters into the counters of the requests concerned."""
        for failure in self.drafters.failures.take():
            self._failed_drafting.add(failure.request_id)
            self.stats.count_failure(failure.drafter)
            state = self.states.get(failure.request_id)
            if state is not None:
                state.stats.count_failure(failure.drafter)
                if failure.is_last:
                    state.stats.disabled_drafters[failure.drafter] = failure.reason

    def _gauge(self) -> None:
        self.stats.num_waiting, self.stats.num_running = len(self.scheduler.waiting), len(self.scheduler.running)

    def release(self, state: RequestState) -> None:
        """Forget a request everywhere: queue, cache, drafter. Whatever raises on the way does not keep the rest from
        being freed.

        An interrupted one is begun again by the next `abort`, so the request leaves `states` last.
        """
        if state.request_id not in self.states:
            return
        if state.request_id in self.scheduler.running:
            with self.faults.contained(
                "the target's cache", f"what it holds of request {state.request_id} may be lost"
            ):
                self._give_back(state)
        self.scheduler.remove(state.request_id)
        with self.faults.contained(
            "a drafter", f"it may keep what it holds of request {state.request_id}, which is over"
        ):
            self.drafters.finish(state.request)
        self._count_failures()
        with self.faults.contained(
            "the controller", f"it may keep what it holds of request {state.request_id}, which is over"
        ):
            self.chooser.finish(state.request_id)
        del self.states[state.request_id]
        self.stats.count_end(state.finish_reason, state.stats.num_emitted)
        self._gauge()
        self.faults.watch(self.watchers, lambda watcher: watcher.end(state))

    def _give_back(self, state: RequestState) -> None:
        """Close a running request's sequence."""
        try:
            if state.finish_reason in ("stop", "length"):
                self.scheduler.publish(state)  # a dialogue goes on where its last answer ended
        finally:
            self.target.close(state.request_id)
