"""One engine without a model: the same admission, chunks, budgets and commits on a virtual clock, with times from a
profile.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.control.queue import RowDemand, RowGrant, Urgency, may_join, reserve_tokens, within_budget, within_cache
from foretoken.plan.profile import Profile
from foretoken.simulate.chooser import Chooser
from foretoken.simulate.records import Round
from foretoken.simulate.setting import Limits, SimSetting
from foretoken.simulate.sim_request import SimRequest


@dataclass(frozen=True)
class Step:
    """What one step did: `emitted` pairs of request and tokens."""

    replica: int
    start_s: float
    seconds: float
    draft_s: float
    num_rows: int  # of the requests that decode
    num_prompt_tokens: int
    emitted: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Drafting:
    """Requests that draft in a step with their budgets, tokens of their texts that are new to the drafter, and what it
    takes.
    """

    drafting: tuple[tuple[SimRequest, int], ...] = ()
    num_unread: int = 0
    seconds: float = 0.0


@dataclass
class SimEngine:
    """One engine: its queue and its running requests, most urgent first, its clock and who chooses for it."""

    number: int
    profile: Profile
    setting: SimSetting
    limits: Limits
    watch: Callable[[Step], None] | None = None
    clock_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    waiting: list[SimRequest] = field(default_factory=list)
    running: list[SimRequest] = field(default_factory=list)
    chooser: Chooser = field(init=False)
    courses: list[SimRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = Chooser(self.setting)

    def add(self, course: SimRequest) -> None:
        """Queue a request at its arrival; an idle engine begins with it at once."""
        if not self.has_work:
            self.clock_s = max(self.clock_s, course.job.arrival_s)
        course.tokens = course.job.prompt_tokens
        insort(self.waiting, course, key=_urgency)
        self.courses.append(course)

    def run_until(self, time_s: float) -> None:
        """Run every step that begins before `time_s`."""
        while self.has_work and self.clock_s < time_s:
            self.step()

    def load_at(self, time_s: float) -> int:
        """Requests that came and were not finished at `time_s`."""
        self.courses = [course for course in self.courses if course.finish_s is None or course.finish_s > time_s]
        return len(self.courses)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def step(self) -> None:
        """One step of the engine, see `engine.scheduler` for the order of things."""
        self._admit()
        asks = self._asks()
        grants, preempted = self._grants(asks)
        seats = list(zip(self.running, asks, grants, strict=True))
        anchors = [(course, grant.num_draft) for course, ask, grant in seats if ask.decodes]
        chunks = [(course, grant.num_pending) for course, ask, grant in seats if not ask.decodes and grant.num_pending]
        rounds = [course.guess(budget) for course, budget in anchors]
        draft = self._draft(anchors)
        rows, prompt_tokens = (
            len(anchors) + sum(len(found.parents) for found in rounds),
            sum(length for _, length in chunks),
        )
        target_s = self.profile.step_s(rows, [course.held for course, _ in (*anchors, *chunks)], prompt_tokens)
        lasts = [course for course, length in chunks if course.held + length == course.tokens]
        if not chunks:
            self.chooser.observe_step(rows, rounds, target_s, draft.seconds)
        for (course, budget), found in zip(anchors, rounds, strict=True):
            self.chooser.observe_round(course, budget, found)
        for course in lasts:
            self.chooser.observe_round(course, 0, Round())
        self.chooser.observe_draft(draft.drafting, draft.seconds, draft.num_unread)
        start_s, seconds = self.clock_s, draft.seconds + target_s
        self.clock_s += seconds
        self.busy_s += seconds
        self.num_steps += 1
        for course, length in chunks:
            course.held += length
        for (course, _), found in zip(anchors, rounds, strict=True):
            course.held = course.tokens + len(found.path)
            course.num_drafted += len(found.parents)
            course.num_accepted += len(found.path)
        emitted = [(course, len(found.path) + 1) for (course, _), found in zip(anchors, rounds, strict=True)] + [
            (course, 1) for course in lasts
        ]
        for course, count in emitted:
            self._emit(course, count)
        if self.watch is not None:
            pairs = tuple((course.index, count) for course, count in emitted)
            self.watch(Step(self.number, start_s, seconds, draft.seconds, rows, prompt_tokens, pairs, preempted))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch_size:
            if self.running and not self._fits(self.waiting[0]):
                return
            insort(self.running, self.waiting.pop(0), key=_urgency)

    def _fits(self, course: SimRequest) -> bool:
        footprint = self.limits.footprint_tokens
        owed = sum(footprint(c.tokens) - footprint(c.held) for c in self.running)
        return may_join(
            footprint(course.tokens),
            owed,
            reserve_tokens(self.limits, self.limits.capacity_tokens),
            self._free_tokens(),
        )

    def _free_tokens(self) -> float:
        return self.limits.capacity_tokens - sum(self.limits.footprint_tokens(course.held) for course in self.running)

    def _asks(self) -> list[RowDemand]:
        """What every running request could do: decode with guesses, or read all but the last token of an answer that
        has begun.
        """
        anchors = [course for course in self.running if course.tokens - course.held == 1]
        budgets = dict(zip((course.index for course in anchors), self.chooser.plan(anchors, self.clock_s), strict=True))
        return [
            RowDemand(c.held, 1, True, budgets[c.index])
            if c.index in budgets
            else RowDemand(c.held, c.tokens - c.held - bool(c.num_emitted), False)
            for c in self.running
        ]

    def _grants(self, asks: list[RowDemand]) -> tuple[list[RowGrant], tuple[int, ...]]:
        """Rows for every request, and who had to give way, whose `asks` are removed; see `engine.scheduler`."""
        preempted: list[int] = []
        while True:
            wanted = within_budget(asks, self.limits)
            grants = within_cache(asks, wanted, self._free_tokens(), self.limits.footprint_tokens)
            if grants is not None:
                return grants, tuple(preempted)
            asks.pop()
            course = self.running.pop()
            course.held, course.has_drafted = 0, False
            course.num_preempted += 1
            preempted.append(course.index)
            insort(self.waiting, course, key=_urgency)

    def _draft(self, anchors: Sequence[tuple[SimRequest, int]]) -> _Drafting:
        """What the drafter does in this step: a text that is new to it is read first."""
        drafting = tuple((course, budget) for course, budget in anchors if budget)
        if self.setting.drafter is None or not drafting:
            return _Drafting()
        num_unread = sum(course.tokens for course, _ in drafting if not course.has_drafted)
        for course, _ in drafting:
            course.has_drafted = True
        longest = max(budget for _, budget in drafting)
        return _Drafting(
            drafting,
            num_unread,
            self.profile.drafters[self.setting.drafter].seconds(longest, len(drafting), num_unread),
        )

    def _emit(self, course: SimRequest, count: int) -> None:
        course.tokens += count
        course.num_steps += 1
        if course.first_s is None:
            course.first_s = self.clock_s
        if course.num_emitted >= course.output_tokens:
            course.finish_s = self.clock_s
            self.running.remove(course)
            self.chooser.finish(course.index)


def _urgency(course: SimRequest) -> Urgency:
    return course.urgency
