"""The loop. `Engine.step` is seven calls: schedule, propose, forward, verify, commit, observe, emit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, StepOutput, Uniforms, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.group import DrafterGroup
from foretoken.engine.accounts import charge, gain
from foretoken.engine.controller import Controller
from foretoken.engine.emission import emit, fail, note_prompt
from foretoken.engine.intake import Intake
from foretoken.engine.request import RequestState
from foretoken.engine.runner import Runner, TargetOutput
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.stats import EngineStats
from foretoken.engine.watch import RoundView, StepClock, Watcher
from foretoken.model.interface import LanguageModel
from foretoken.model.randomness import round_uniforms
from foretoken.model.tokenizer import Tokenizer
from foretoken.plan.admission import SchedulerConfig
from foretoken.plan.routing import RoutingRules
from foretoken.verify import needs_uniforms, verify_batch


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
        self.target, self.drafters = target, drafters
        self.runner, self.controller = Runner(target), Controller(drafters.look, routing, drafters.serves)
        self.scheduler = Scheduler(target, limits or SchedulerConfig(), self.controller.plan)
        self.intake = Intake(target, tokenizer, target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.states: dict[int, RequestState] = {}
        self.stats = EngineStats()
        self.watchers: list[Watcher] = []
        self._ids = itertools.count()
        self.clock = StepClock()

    def step(self) -> list[StepOutput]:
        """Advance every running request by one round; what each of them emitted. Nothing happens when there is no work."""
        if not self.has_work:
            return []
        batch = self._schedule()
        draft = self._propose(batch)
        target = self._forward(batch, draft)
        verdict = self._verify(batch, draft, target)
        self._commit(batch, draft, target, verdict)
        self._observe(batch, draft, target, verdict)
        return self._emit(batch, draft, target, verdict)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue a request; the returned state carries its number and, as it runs, its tokens.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run; nothing was queued.
        """
        state = self.intake.admit(next(self._ids), prompt_ids, params, spec)
        self.drafters.start(state.request)
        self.states[state.request_id] = state
        self.scheduler.add(state)
        state.stats.num_prompt_tokens = len(prompt_ids)
        self.stats.num_prompt_tokens += len(prompt_ids)
        self.stats.num_submitted += 1
        self._gauge()
        for watcher in self.watchers:
            watcher.begin(state)
        return state

    def abort(self, request_id: int) -> None:
        """Drop a request at once and free all it holds; unknown numbers are ignored, since it may just have finished."""
        state = self.states.get(request_id)
        if state is not None:
            state.finish_reason = "abort"
            self._release(state)

    def fail_running(self, error: Exception) -> list[StepOutput]:
        """After a step that raised: end every request that ran in it with `error`; those that wait go on."""
        outputs = []
        for state in list(self.scheduler.running.values()):
            outputs.append(fail(state, error))
            self._release(state)
        return outputs

    def close(self) -> None:
        """Drop every request and let the watchers finish."""
        for request_id in list(self.states):
            self.abort(request_id)
        for watcher in self.watchers:
            watcher.close()

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.states)

    def _schedule(self) -> Batch:
        self.clock = StepClock(began=time.perf_counter())
        batch = self.scheduler.schedule()
        for state in self.scheduler.preempted:
            self.drafters.release(state.request)
        self.stats.num_preempted += len(self.scheduler.preempted)
        self.stats.num_recomputed_tokens += self.scheduler.num_recomputed_tokens
        self._gauge()
        self.clock.scheduled = time.perf_counter()
        return batch

    def _propose(self, batch: Batch) -> Draft:
        draft = self.drafters.propose(batch)
        self.clock.proposed = time.perf_counter()
        return draft

    def _forward(self, batch: Batch, draft: Draft) -> TargetOutput:
        target = self.runner.forward(batch, draft, self.drafters.taps())
        self.clock.forwarded = time.perf_counter()
        return target

    def _verify(self, batch: Batch, draft: Draft, target: TargetOutput) -> Verdict:
        entries = batch.decoding
        rules = [self.states[entry.request.request_id].rule for entry in entries]
        uniforms = self._uniforms(batch, draft, rules)
        if any(entry.noise is not None for entry in entries):
            race = (None if e.noise is None else e.noise.at([e.round_start + d for d in (0, *draft.depths(b))]) for b, e in enumerate(entries))
            uniforms = replace(uniforms, race=tuple(race))
        verdict = verify_batch(draft, target.probs, uniforms, rules)
        self.clock.verified = time.perf_counter()
        return verdict

    def _uniforms(self, batch: Batch, draft: Draft, rules: Sequence[str]) -> Uniforms:
        """The round's random numbers; where no rule reads any, as in greedy rounds, numbers that would break one that did."""
        device = self.target.device
        if not any(needs_uniforms(rule) for rule in set(rules)):
            return Uniforms(torch.full((draft.num_nodes,), torch.nan, device=device), torch.full((draft.num_requests,), torch.nan, device=device))
        return round_uniforms(draft, [e.request.seed for e in batch.decoding], [e.round_start for e in batch.decoding], device)

    def _commit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        for b, entry in enumerate(batch.decoding):
            self.target.commit(entry.request.request_id, len(entry.pending), verdict.paths[b])
        for entry in batch.entries[len(batch.decoding) :]:
            self.target.commit(entry.request.request_id, len(entry.pending))
        for entry in batch.entries:
            if len(entry.pending) > 1:  # a piece of a prompt
                self.scheduler.publish(self.states[entry.request.request_id])
        feedback = Feedback(target.processed, tuple(range(draft.num_rows)), target.taps, target.probe_logits, tuple(range(sum(draft.probe_lengths))))
        proposing_s = sum(self.drafters.spent_s.values())
        self.drafters.commit(batch, draft, verdict, feedback)
        self.clock.taught_s = sum(self.drafters.spent_s.values()) - proposing_s
        self.clock.committed = time.perf_counter()

    def _observe(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        """Let the controller learn from the step, and share out the time it took."""
        clock, spent_s, states = self.clock, self.drafters.spent_s, [self.states[entry.request.request_id] for entry in batch.entries]
        self._count_failures()
        self.controller.observe(batch, draft, target.probs, verdict, spent_s, clock.target_s + clock.rule_s, self.drafters.num_read_tokens)
        for entry, state in zip(batch.entries, states, strict=True):
            if not state.stats.started:
                self._count_start(state, entry)
        charge(batch, draft, verdict, clock, spent_s, self.controller.policy.target_cost, [state.stats for state in states], self.stats)
        clock.observed = time.perf_counter()

    def _emit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> list[StepOutput]:
        outputs, now = [], self.clock.observed
        per_token = gain(batch, self.clock, self.controller.policy.target_cost)
        for entry in batch.entries:
            if entry.request.params.prompt_logprobs is not None:
                note_prompt(self.states[entry.request.request_id], target)
        for b, entry in enumerate(batch.decoding):
            state = self.states[entry.request.request_id]
            output = emit(state, draft, target, verdict, b, now, self.stats)
            if per_token is not None:
                plain_s = len(output.token_ids) * per_token[0]
                state.stats.count_gain(plain_s, per_token[1])
                self.stats.count_gain(plain_s, per_token[1])
            outputs.append(output)
            for watcher in self.watchers:
                watcher.round(RoundView(entry, draft, verdict, b, output, self.clock))
            if state.finish_reason is not None:
                self._release(state)
        self._book()
        for watcher in self.watchers:
            watcher.between_steps()
        return outputs

    def _book(self) -> None:
        """Add the step's phases to the totals; the drafting is there already, charged to the requests."""
        clock, stats = self.clock, self.stats
        clock.emitted = time.perf_counter()
        stats.num_steps += 1
        stats.schedule_s += clock.schedule_s
        stats.target_s += clock.target_s
        stats.rule_s += clock.rule_s
        stats.commit_s += clock.commit_s
        stats.observe_s += clock.observe_s
        stats.emit_s += clock.emit_s

    def _count_start(self, state: RequestState, entry: BatchEntry) -> None:
        """A request takes part for the first time: it has waited, and the cache knew the beginning of its prompt."""
        state.stats.started, state.stats.queued_s, state.stats.num_cached_tokens = True, self.clock.scheduled - state.arrived_s, entry.start
        self.stats.num_started += 1
        self.stats.queued_s += state.stats.queued_s
        self.stats.num_cached_tokens += entry.start

    def _count_failures(self, leaving: RequestState | None = None) -> None:
        """Put what failed in drafters into the counters of the requests concerned, one that just leaves included."""
        for failure in self.drafters.failures.take():
            self.stats.count_failure(failure.drafter)
            state = leaving if leaving is not None and leaving.request_id == failure.request_id else self.states.get(failure.request_id)
            if state is not None:
                state.stats.count_failure(failure.drafter)
                if failure.is_last:
                    state.stats.disabled_drafters[failure.drafter] = failure.reason

    def _gauge(self) -> None:
        self.stats.num_waiting, self.stats.num_running = len(self.scheduler.waiting), len(self.scheduler.running)

    def _release(self, state: RequestState) -> None:
        """Forget a request everywhere: queue, cache, drafter."""
        self.states.pop(state.request_id)
        was_running = state.request_id in self.scheduler.running
        if was_running and state.finish_reason in ("stop", "length"):
            self.scheduler.publish(state)  # a dialogue goes on where its last answer ended
        self.scheduler.remove(state.request_id)
        if was_running:
            self.target.close(state.request_id)
        self.drafters.finish(state.request)
        self._count_failures(state)
        self.controller.finish(state.request_id)
        self.stats.count_end(state.finish_reason, state.stats.num_emitted)
        self._gauge()
        for watcher in self.watchers:
            watcher.end(state)
