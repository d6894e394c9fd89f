"""Requests submitted to the real engine at their arrival times, with every step recorded.

One thread does all: it queues what has arrived and runs a step, or waits for the next arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.chooser import Policy
from foretoken.control.policy import BudgetPolicy
from foretoken.core import StepOutput
from foretoken.draft.base import Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.watch import RoundView
from foretoken.errors import EngineError
from foretoken.simulate.inputs import Job
from foretoken.simulate.metrics import Served, SimMetrics, figures
from foretoken.simulate.sim_request import Round
from foretoken.simulate.simulate import Step

_NAP_S = 0.0005  # longest sleep while idle, so that arrivals are noticed in time


class Clock(Protocol):
    """Tells the time in seconds, and lets it pass."""

    def now(self) -> float:
        """Seconds since some beginning."""

    def wait_until(self, time_s: float) -> None:
        """Return at `time_s` or soon after."""


class WallClock:
    """Real time."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._began

    def wait_until(self, time_s: float) -> None:
        """Sleep in short naps."""
        while (left := time_s - self.now()) > 0:
            time.sleep(min(left, _NAP_S))


class Serving(Protocol):
    """The part of `foretoken.LLM` that a replay uses."""

    @property
    def engine(self) -> Engine:
        """Watched, and asked whether it has work."""

    def loaded_drafters(self, spec: SpecConfig) -> tuple[Drafter, ...]:
        """The drafters of `spec`."""

    def reset_controller(self, policy: Policy) -> Policy:
        """Decide by `policy`."""

    def submit(self, prompt: list[int], params: SamplingParams, spec: SpecConfig) -> RequestState:
        """Queue a request."""

    def step(self) -> list[StepOutput]:
        """One step of the engine."""


@dataclass(frozen=True)
class MeasuredStep:
    """A real step: `step` as the simulator writes it down, and what decides its cost.

    `contexts` is the past of each request in it, tokens. `longest_draft` draft tokens were asked for by the one of
    `num_drafting` requests that was given most; `num_unread` tokens of text were new to the drafter. `seen` are the
    rounds: request, place of the answer (0: its second token), budget, and what was drafted and accepted.
    """

    step: Step
    contexts: tuple[int, ...]
    longest_draft: int
    num_drafting: int
    num_unread: int
    seen: tuple[tuple[int, int, int, Round], ...]


@dataclass(frozen=True)
class Replayed:
    """A trace that ran: what became of each request, in order of arrival; every step; seconds between steps while work
    was there.
    """

    setting: str
    served: tuple[Served, ...]
    steps: tuple[MeasuredStep, ...]
    submit_s: float
    outside_s: float
    token_ids: tuple[tuple[int, ...], ...] = ()

    @property
    def outcome(self) -> SimMetrics:
        """The figures, in the simulator's shape; the time between steps counts as computing."""
        busy_s = sum(one.step.seconds for one in self.steps) + self.outside_s
        return figures(self.setting, self.served, busy_s, len(self.steps))

    def rounds(self) -> list[dict[int, tuple[int, Round]]]:
        """For each request its rounds with draft tokens: by place of the answer, the budget and the round."""
        found: list[dict[int, tuple[int, Round]]] = [{} for _ in self.served]
        for one in self.steps:
            for index, place, budget, seen in one.seen:
                found[index][place] = (budget, seen)
        return found


@dataclass
class _Recorder:
    """Watches an engine and writes down each step, from its rounds and from how far prompts were read."""

    engine: Engine
    numbers: dict[int, int] = field(default_factory=dict)  # of the trace's requests, by the engine's
    entries: list[RoundView] = field(default_factory=list)
    drafted: set[int] = field(default_factory=set)
    held: dict[int, int] = field(
        default_factory=dict
    )  # tokens read, of requests that ran and did not decode in the last step

    def begin(self, state: RequestState) -> None:
        """Requests come in the order of the trace."""
        self.numbers[state.request_id] = len(self.numbers)

    def round(self, view: RoundView) -> None:
        """Keep it until the step is over."""
        self.entries.append(view)

    def end(self, state: RequestState) -> None:
        """Its last round was told before."""

    def between_steps(self) -> None:
        """No background work."""

    def close(self) -> None:
        """Holds nothing."""

    def take(self, start_s: float, seconds: float, outputs: Sequence[StepOutput]) -> MeasuredStep:
        """The step that just ran."""
        views, self.entries = self.entries, []
        anchors = [view for view in views if len(view.entry.pending) == 1]
        wholes = [view for view in views if len(view.entry.pending) > 1]
        contexts = [view.entry.start for view in (*anchors, *wholes)]
        num_prompt = sum(len(view.entry.pending) for view in wholes)
        ended = {view.entry.request.request_id for view in views}
        running = {
            number: self.engine.target.length(number) for number in self.engine.scheduler.running if number not in ended
        }
        for number, length in running.items():
            before = self.held.get(number, 0)
            if length > before:
                contexts.append(before)
                num_prompt += length - before
        self.held = running
        drafting = [view for view in anchors if view.entry.num_draft]
        unread = sum(view.entry.round_start for view in drafting if view.entry.request.request_id not in self.drafted)
        self.drafted |= {view.entry.request.request_id for view in drafting}
        rows = sum(1 + view.draft.lengths[view.b] for view in anchors)
        emitted = tuple((self.numbers[output.request_id], len(output.token_ids)) for output in outputs)
        draft_s = sum(self.engine.drafters.spent_s.values())
        return MeasuredStep(
            Step(0, start_s, seconds, draft_s, rows, num_prompt, emitted),
            tuple(contexts),
            max((view.entry.num_draft for view in drafting), default=0),
            len(drafting),
            unread,
            tuple(self._seen(view) for view in drafting),
        )

    def _seen(self, view: RoundView) -> tuple[int, int, int, Round]:
        entry, draft = view.entry, view.draft
        parents = draft.parents[draft.offsets[view.b] : draft.offsets[view.b + 1]]
        place = entry.round_start - len(entry.request.prompt_ids) - 1
        return (
            self.numbers[entry.request.request_id],
            place,
            entry.num_draft,
            Round(tuple(parents), tuple(view.verdict.paths[view.b])),
        )


def replay(
    llm: Serving,
    jobs: Sequence[Job],
    prompts: Sequence[Sequence[int]],
    specs: Sequence[SpecConfig],
    setting: str,
    clock: Clock | None = None,
    tell: Callable[[int], None] = lambda _finished: None,
    tenant: str = "",
) -> Replayed:
    """Run `jobs`, in order of arrival, to their end, greedily; `prompts` and `specs` are one for each. `tell` hears how
    many finished. With a `tenant` each request has one of its own, under that name and its number.

    The policy begins knowing nothing, as a simulation's does: what earlier runs taught it would be forgotten in no
    other way.

    Raises:
        EngineError: a request failed; a run that lost requests measures nothing.
    """
    clock = clock or WallClock()
    recorder = _Recorder(llm.engine)
    llm.reset_controller(BudgetPolicy())
    llm.engine.watchers.append(recorder)
    states: list[RequestState] = []
    firsts: dict[int, float] = {}
    finishes: dict[int, float] = {}
    steps: list[MeasuredStep] = []
    submit_s = outside_s = 0.0
    began_s, free_s = clock.now(), clock.now()
    try:
        while len(states) < len(jobs) or llm.engine.has_work:
            if not llm.engine.has_work:
                clock.wait_until(began_s + jobs[len(states)].arrival_s)
                free_s = clock.now()
            while len(states) < len(jobs) and began_s + jobs[len(states)].arrival_s <= (before_s := clock.now()):
                states.append(
                    _submit(
                        llm,
                        jobs[len(states)],
                        prompts[len(states)],
                        specs[len(states)],
                        tenant=f"{tenant} {len(states)}" if tenant else "",
                    )
                )
                submit_s += clock.now() - before_s
            start_s = clock.now()
            outside_s += start_s - free_s
            outputs = llm.step()
            free_s = clock.now()
            steps.append(recorder.take(start_s - began_s, free_s - start_s, outputs))
            for output in outputs:
                if output.error is not None:
                    raise EngineError(
                        f"request {output.request_id} of the replay failed: {output.error}"
                    ) from output.error
                if output.token_ids:
                    firsts.setdefault(output.request_id, free_s - began_s)
                if output.finish_reason is not None:
                    finishes[output.request_id] = free_s - began_s
                    tell(len(finishes))
    finally:
        llm.engine.watchers.remove(recorder)
        for state in states:
            llm.engine.abort(state.request_id)
    served = tuple(_served(job, state, firsts, finishes) for job, state in zip(jobs, states, strict=True))
    return Replayed(
        setting, served, tuple(steps), submit_s, outside_s, tuple(tuple(state.output_ids) for state in states)
    )


def _submit(llm: Serving, job: Job, prompt: Sequence[int], spec: SpecConfig, tenant: str) -> RequestState:
    params = SamplingParams(
        max_tokens=job.output_tokens,
        temperature=0.0,
        ignore_eos=True,
        seed=0,
        priority=job.priority,
        deadline_s=job.deadline_s,
        tenant=tenant,
    )
    return llm.submit(list(prompt), params, spec)


def _served(job: Job, state: RequestState, firsts: Mapping[int, float], finishes: Mapping[int, float]) -> Served:
    own, stats = state.request_id, state.stats
    return Served(
        job.arrival_s,
        firsts[own],
        finishes[own],
        stats.num_emitted,
        stats.num_steps,
        stats.num_drafted,
        stats.num_accepted,
    )
