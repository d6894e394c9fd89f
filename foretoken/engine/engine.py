"""The loop. `Engine.step` is seven calls: schedule, propose, forward, verify, commit, observe, emit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, Draft, StepOutput, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.group import DrafterGroup
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
from foretoken.verify import verify_batch


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
        self.runner, self.controller = Runner(target), Controller(drafters.look, routing)
        self.scheduler = Scheduler(target, limits or SchedulerConfig(), self.controller.plan)
        self.intake = Intake(target, tokenizer, target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.states: dict[int, RequestState] = {}
        self.stats = EngineStats()
        self.watchers: list[Watcher] = []
        self._ids = itertools.count()
        self._clock = StepClock()

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
            self.stats.count(outputs[-1], 0)
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
        self._clock = StepClock(began=time.perf_counter())
        batch = self.scheduler.schedule()
        for state in self.scheduler.preempted:
            self.drafters.release(state.request)
        self.stats.num_preempted += len(self.scheduler.preempted)
        self.stats.num_recomputed_tokens += self.scheduler.num_recomputed_tokens
        self._clock.scheduled = time.perf_counter()
        return batch

    def _propose(self, batch: Batch) -> Draft:
        draft = self.drafters.propose(batch)
        self._clock.proposed = time.perf_counter()
        return draft

    def _forward(self, batch: Batch, draft: Draft) -> TargetOutput:
        target = self.runner.forward(batch, draft, self.drafters.taps())
        self._clock.forwarded = time.perf_counter()
        return target

    def _verify(self, batch: Batch, draft: Draft, target: TargetOutput) -> Verdict:
        entries, device = batch.decoding, target.probs.device
        uniforms = round_uniforms(draft, [e.request.seed for e in entries], [e.round_start for e in entries], device)
        race = tuple(None if e.noise is None else e.noise.at([e.round_start + d for d in (0, *draft.depths(b))]) for b, e in enumerate(entries))
        rules = [self.states[entry.request.request_id].rule for entry in entries]
        verdict = verify_batch(draft, target.probs, replace(uniforms, race=race), rules)
        self._clock.verified = time.perf_counter()
        return verdict

    def _commit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        for b, entry in enumerate(batch.decoding):
            self.target.commit(entry.request.request_id, len(entry.pending), verdict.paths[b])
        for entry in batch.entries[len(batch.decoding) :]:
            self.target.commit(entry.request.request_id, len(entry.pending))
        for entry in batch.entries:
            if len(entry.pending) > 1:  # a piece of a prompt
                self.scheduler.publish(self.states[entry.request.request_id])
        feedback = Feedback(target.processed, tuple(range(draft.num_rows)), target.taps, target.probe_logits, tuple(range(sum(draft.probe_lengths))))
        self.drafters.commit(batch, draft, verdict, feedback)

    def _observe(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        """Share out the time the step took, and let the controller learn from it."""
        clock, drafted = self._clock, max(1, draft.num_nodes)
        num_rows = draft.num_rows + sum(draft.probe_lengths)
        self.controller.observe(batch, draft, target.probs, verdict, self.drafters.spent_s, clock.verified - clock.proposed)
        for b, entry in enumerate(batch.decoding):
            stats = self.states[entry.request.request_id].stats
            stats.num_steps += 1
            stats.draft_s += (clock.proposed - clock.scheduled) * draft.lengths[b] / drafted
            stats.verify_s += (clock.verified - clock.proposed) * (1 + draft.lengths[b] + draft.probe_lengths[b]) / num_rows

    def _emit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> list[StepOutput]:
        outputs, now = [], time.perf_counter()
        for entry in batch.entries:
            note_prompt(self.states[entry.request.request_id], target)
        for b, entry in enumerate(batch.decoding):
            state = self.states[entry.request.request_id]
            output = emit(state, draft, target, verdict, b, now)
            self.stats.count(output, draft.lengths[b], draft.probe_lengths[b])
            outputs.append(output)
            for watcher in self.watchers:
                watcher.round(RoundView(entry, draft, verdict, b, output, self._clock))
            if state.finish_reason is not None:
                self._release(state)
        self._book(now)
        for watcher in self.watchers:
            watcher.between_steps()
        return outputs

    def _book(self, now: float) -> None:
        clock = self._clock
        self.stats.num_steps += 1
        self.stats.schedule_s += clock.scheduled - clock.began
        self.stats.draft_s += clock.proposed - clock.scheduled
        self.stats.target_s += clock.forwarded - clock.proposed
        self.stats.rule_s += clock.verified - clock.forwarded
        self.stats.rest_s += now - clock.verified

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
        self.controller.finish(state.request_id)
        for watcher in self.watchers:
            watcher.end(state)
