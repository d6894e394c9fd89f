"""The loop. `Engine.step` is seven calls: schedule, propose, forward, verify, commit, observe, emit."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import Batch, Draft, Request, StepOutput, TokenKind, TokenOrigin, Verdict
from foretoken.draft.group import DrafterGroup
from foretoken.engine.controller import Controller
from foretoken.engine.intake import check_request
from foretoken.engine.request import RequestState, TextAssembler
from foretoken.engine.runner import Runner, TargetOutput
from foretoken.engine.scheduler import Scheduler, SchedulerConfig
from foretoken.engine.stats import EngineStats
from foretoken.errors import NumericsError
from foretoken.model.interface import LanguageModel
from foretoken.model.sampling import round_uniforms
from foretoken.model.tokenizer import Detokenizer, Tokenizer
from foretoken.verify import resolve, verify_batch


@dataclass
class StepClock:
    """When each phase of the running step ended, in seconds of `time.perf_counter`."""

    began: float = 0.0
    scheduled: float = 0.0
    proposed: float = 0.0
    forwarded: float = 0.0
    verified: float = 0.0


class Engine:
    """Serves many requests with one target; every request keeps its own drafter, rule and sampling."""

    def __init__(
        self,
        target: LanguageModel,
        drafters: DrafterGroup,
        tokenizer: Tokenizer | None = None,
        limits: SchedulerConfig | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        self.target, self.drafters, self.tokenizer = target, drafters, tokenizer
        self.eos_token_ids = frozenset(target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.runner, self.controller = Runner(target), Controller()
        self.scheduler = Scheduler(target, limits or SchedulerConfig(), self.controller.choose)
        self.states: dict[int, RequestState] = {}
        self.stats = EngineStats()
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
        self._observe(batch, draft, target)
        return self._emit(batch, draft, target, verdict)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue a request; the returned state carries its number and, as it runs, its tokens.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run; nothing was queued.
        """
        max_total = check_request(prompt_ids, params, spec, self.target, self.tokenizer is not None)
        resolve(spec.rule, params.greedy)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        request = Request(next(self._ids), tuple(prompt_ids), params, spec, seed)
        decoder = None if self.tokenizer is None else Detokenizer(self.tokenizer)
        state = RequestState(request, TextAssembler(decoder, params.stop_strings), self.eos_token_ids, max_total)
        self.drafters.start(request)
        self.states[request.request_id] = state
        self.scheduler.add(state)
        return state

    def abort(self, request_id: int) -> None:
        """Drop a request at once and free all it holds; unknown numbers are ignored, since it may just have finished."""
        state = self.states.get(request_id)
        if state is not None:
            state.finish_reason = "abort"
            self._release(state)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.states)

    def _schedule(self) -> Batch:
        self._clock = StepClock(began=time.perf_counter())
        batch = self.scheduler.schedule()
        self._clock.scheduled = time.perf_counter()
        return batch

    def _propose(self, batch: Batch) -> Draft:
        draft = self.drafters.propose(batch)
        self._clock.proposed = time.perf_counter()
        return draft

    def _forward(self, batch: Batch, draft: Draft) -> TargetOutput:
        target = self.runner.forward(batch, draft)
        self._clock.forwarded = time.perf_counter()
        return target

    def _verify(self, batch: Batch, draft: Draft, target: TargetOutput) -> Verdict:
        requests = [entry.request for entry in batch.decoding]
        rules = [resolve(request.spec.rule, request.params.greedy) for request in requests]
        uniforms = round_uniforms(draft, [r.seed for r in requests], [e.round_start for e in batch.decoding], target.probs.device)
        verdict = verify_batch(draft, target.probs, uniforms, rules)
        self._clock.verified = time.perf_counter()
        return verdict

    def _commit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> None:
        for b, entry in enumerate(batch.decoding):
            self.target.commit(entry.request.request_id, len(entry.pending), verdict.paths[b])
        for entry in batch.entries[len(batch.decoding) :]:
            self.target.commit(entry.request.request_id, len(entry.pending))
        self.drafters.commit(batch, draft, verdict, target.taps)

    def _observe(self, batch: Batch, draft: Draft, target: TargetOutput) -> None:
        """Share out the time the step took; a broken request's round does not count."""
        clock, drafted = self._clock, max(1, draft.num_nodes)
        for b, entry in enumerate(batch.decoding):
            if b in target.broken:
                continue
            stats = self.states[entry.request.request_id].stats
            stats.num_steps += 1
            stats.draft_s += (clock.proposed - clock.scheduled) * draft.lengths[b] / drafted
            stats.verify_s += (clock.verified - clock.proposed) * (1 + draft.lengths[b]) / draft.num_rows

    def _emit(self, batch: Batch, draft: Draft, target: TargetOutput, verdict: Verdict) -> list[StepOutput]:
        outputs, now = [], time.perf_counter()
        for b, entry in enumerate(batch.decoding):
            state = self.states[entry.request.request_id]
            outputs.append(self._fail(state) if b in target.broken else self._emit_one(state, draft, target, verdict, b, now))
            if state.finish_reason is not None:
                self._release(state)
        self._book(now)
        return outputs

    def _emit_one(self, state: RequestState, draft: Draft, target: TargetOutput, verdict: Verdict, b: int, now: float) -> StepOutput:
        """Append what request `b` emitted, up to where its answer ends; only tokens before that point count as accepted."""
        first = len(state.origins)
        for token, origin in zip(verdict.emitted(b), self._origins(state, draft, verdict, b), strict=True):
            if state.append(token, origin):
                break
        num_new = len(state.origins) - first
        rows = [draft.anchor_row(b), *(draft.anchor_row(b) + 1 + node for node in verdict.paths[b])]
        stats, num_kept = state.stats, min(num_new, len(verdict.accepted[b]))
        stats.count_round(draft.depths(b), num_kept, num_new, sum(target.near_ties[row] for row in rows[:num_new]))
        stats.total_s = now - state.arrived_s
        if not first:
            stats.ttft_s = stats.total_s
        state.num_rounds += 1
        self.stats.num_drafted += draft.lengths[b]
        self.stats.num_accepted += num_kept
        self.stats.num_emitted += num_new
        self.stats.num_finished += state.finish_reason is not None
        text = state.text.release(final=state.finish_reason is not None)
        return StepOutput(state.request_id, tuple(state.tokens[-num_new:]), text, tuple(state.origins[first:]), state.finish_reason)

    def _origins(self, state: RequestState, draft: Draft, verdict: Verdict, b: int) -> list[TokenOrigin]:
        drafter = draft.drafters[b]
        last: TokenKind = verdict.next_kinds[b] if draft.lengths[b] else "plain"
        accepted = [TokenOrigin(drafter, "accepted", state.num_rounds) for _ in verdict.accepted[b]]
        return [*accepted, TokenOrigin(None, last, state.num_rounds)]

    def _fail(self, state: RequestState) -> StepOutput:
        error = NumericsError(f"request {state.request_id}: the target's logits are not finite at token {len(state.tokens)}")
        state.finish_reason = "error"
        self.stats.num_failed += 1
        return StepOutput(state.request_id, (), state.text.release(final=True), (), "error", error)

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
        self.scheduler.remove(state.request_id)
        if was_running:
            self.target.close(state.request_id)
        self.drafters.finish(state.request)
