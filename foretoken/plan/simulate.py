"""The engine without a model: the same admission, chunks, budgets and commits on a virtual clock, with times from a profile.

What is left to chance is whether a guess stands. It is drawn once for every request and place of its answer, so that two settings
differ by what they do and not by luck, and so that more acceptance can never make a round emit less.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foretoken.errors import CapacityError, ConfigError, InputError
from foretoken.plan.admission import (
    Ask,
    Grant,
    SchedulerConfig,
    Urgency,
    may_join,
    reserve_tokens,
    urgency,
    within_budget,
    within_cache,
)
from foretoken.plan.arrivals import Chances, Job
from foretoken.plan.policy import MOST_NUM_DRAFT, BudgetPolicy
from foretoken.plan.profile import Profile
from foretoken.plan.rounds import Record, Records, Round, chain
from foretoken.plan.wishes import weight_of, wish_of

Known = Mapping[str, Mapping[str, Chances | Records]]  # by drafter and name: chances, or answers that were looked at

PLAIN = "plain"
DISPATCHES = ("round_robin", "least_loaded")


@dataclass(frozen=True)
class Setting:
    """Who guesses (None: nobody) and how much (None: the controller chooses)."""

    drafter: str | None = None
    num_draft: int | None = 0

    @property
    def name(self) -> str:
        """As rows of the bench are called: plain, ngram-5, draft_model-auto."""
        return PLAIN if self.drafter is None else f"{self.drafter}-{'auto' if self.num_draft is None else self.num_draft}"


@dataclass(frozen=True)
class Limits(SchedulerConfig):
    """The scheduler's limits and the cache's. `cache_tokens` None: more than is ever needed; `max_context_tokens` None: no bound."""

    cache_tokens: int | None = None
    block_tokens: int = 32
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cache_tokens", "block_tokens", "max_context_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")

    def footprint_tokens(self, num_tokens: int) -> int:
        """`num_tokens` in whole blocks."""
        return -(-num_tokens // self.block_tokens) * self.block_tokens

    @property
    def capacity_tokens(self) -> float:
        """What all whole blocks hold."""
        return float("inf") if self.cache_tokens is None else self.cache_tokens // self.block_tokens * self.block_tokens


@dataclass
class Course:
    """One request on its way: `tokens` is prompt and output, `held` what the cache holds. Times are None until they come.

    A drafter that is to guess for a request that `has_drafted` not yet reads its text first.
    """

    index: int
    job: Job
    chances: Chances
    draws: tuple[float, ...]  # [output tokens] uniforms: whether a guess of this token would stand
    output_tokens: int
    urgency: Urgency
    record: Record | None = None  # takes the place of chances and draws
    tokens: int = 0
    held: int = 0
    num_preempted: int = 0
    has_drafted: bool = False
    first_s: float | None = None
    finish_s: float | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_emitted(self) -> int:
        """Tokens of the answer so far."""
        return self.tokens - self.job.prompt_tokens

    @property
    def most_guesses(self) -> int:
        """More could not be used; the first token is never guessed."""
        return self.output_tokens - self.num_emitted - 1 if self.num_emitted else 0

    def num_kept(self, num_draft: int) -> int:
        """How many of the next `num_draft` guesses stand."""
        for place in range(num_draft):
            if self.draws[self.num_emitted + place] >= self.chances[min(place, len(self.chances) - 1)]:
                return place
        return num_draft

    def guess(self, num_draft: int) -> Round:
        """The next round with a budget of `num_draft`."""
        if self.record is not None and num_draft:
            return self.record.at(self.num_emitted - 1, num_draft)
        return chain(num_draft, self.num_kept(num_draft))


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


@dataclass
class Replica:
    """One engine: its queue and its running requests, most urgent first, its clock and its policy."""

    number: int
    profile: Profile
    setting: Setting
    limits: Limits
    watch: Callable[[Step], None] | None = None
    clock_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    waiting: list[Course] = field(default_factory=list)
    running: list[Course] = field(default_factory=list)
    policy: BudgetPolicy = field(default_factory=BudgetPolicy)
    courses: list[Course] = field(default_factory=list)

    def add(self, course: Course) -> None:
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
        anchors = [course for course, ask, _ in seats if ask.decodes]
        budgets = [grant.num_draft for _, ask, grant in seats if ask.decodes]
        chunks = [(course, grant.num_pending) for course, ask, grant in seats if not ask.decodes and grant.num_pending]
        rounds = [course.guess(budget) for course, budget in zip(anchors, budgets, strict=True)]
        drafting = [course for course, budget in zip(anchors, budgets, strict=True) if budget and self.setting.drafter is not None]
        unread = sum(course.tokens for course in drafting if not course.has_drafted)
        draft_s = self._draft_s(drafting, max(budgets, default=0), unread)
        rows, prompt_tokens = len(anchors) + sum(len(r.parents) for r in rounds), sum(length for _, length in chunks)
        lasts = [course for course, length in chunks if course.held + length == course.tokens]
        contexts = [course.held for course in (*anchors, *(course for course, _ in chunks))]
        target_s = self.profile.step_s(rows, contexts, prompt_tokens)
        self._observe(anchors, lasts, budgets, rounds, rows, target_s, draft_s, alone=not chunks)
        if drafting:
            self.policy.observe_draft(self.setting.drafter, max(budgets), draft_s, len(drafting), unread)
        start_s = self.clock_s
        self.clock_s += draft_s + target_s
        self.busy_s += draft_s + target_s
        self.num_steps += 1
        for course, length in chunks:
            course.held += length
        for course, found in zip(anchors, rounds, strict=True):
            course.held = course.tokens + len(found.path)
            course.num_drafted += len(found.parents)
            course.num_accepted += len(found.path)
        emitted = [(course, len(found.path) + 1) for course, found in zip(anchors, rounds, strict=True)] + [(course, 1) for course in lasts]
        for course, count in emitted:
            self._emit(course, count)
        if self.watch is not None:
            pairs = tuple((course.index, count) for course, count in emitted)
            self.watch(Step(self.number, start_s, draft_s + target_s, draft_s, rows, prompt_tokens, pairs, preempted))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch_size:
            if self.running and not self._fits(self.waiting[0]):
                return
            insort(self.running, self.waiting.pop(0), key=_urgency)

    def _fits(self, course: Course) -> bool:
        footprint = self.limits.footprint_tokens
        owed = sum(footprint(c.tokens) - footprint(c.held) for c in self.running)
        return may_join(footprint(course.tokens), owed, reserve_tokens(self.limits, self.limits.capacity_tokens), self._free_tokens())

    def _free_tokens(self) -> float:
        return self.limits.capacity_tokens - sum(self.limits.footprint_tokens(course.held) for course in self.running)

    def _asks(self) -> list[Ask]:
        """What every running request could do: decode with guesses, or read all but the last token of an answer that has begun."""
        anchors = [course for course in self.running if course.tokens - course.held == 1]
        budgets = dict(zip((course.index for course in anchors), self._budgets(anchors), strict=True))
        return [
            Ask(c.held, 1, True, budgets[c.index]) if c.index in budgets else Ask(c.held, c.tokens - c.held - bool(c.num_emitted), False)
            for c in self.running
        ]

    def _grants(self, asks: list[Ask]) -> tuple[list[Grant], tuple[int, ...]]:
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

    def _budgets(self, anchors: Sequence[Course]) -> list[int]:
        wanted = MOST_NUM_DRAFT if self.setting.num_draft is None else self.setting.num_draft
        is_open = self.setting.num_draft is None
        wishes = [
            wish_of(
                c.index,
                self.setting.drafter,
                min(wanted, c.most_guesses),
                is_open,
                c.tokens,
                c.output_tokens - c.num_emitted,
                self._weight(c, len(anchors)),
            )
            for c in anchors
        ]
        return [grant.num_draft for grant in self.policy.plan(wishes)] if wishes else []

    def _weight(self, course: Course, num_running: int) -> float:
        """As `engine.controller` weighs a request."""
        job = course.job
        if not job.priority and job.deadline_s is None:
            return 1.0
        left_s = None if job.deadline_s is None else job.arrival_s + job.deadline_s - self.clock_s
        return weight_of(job.priority, left_s, (course.output_tokens - course.num_emitted) * self.policy.target_cost.seconds(num_running))

    def _draft_s(self, drafting: Sequence[Course], longest: int, unread: int) -> float:
        if self.setting.drafter is None or not drafting:
            return 0.0
        for course in drafting:
            course.has_drafted = True
        return self.profile.drafters[self.setting.drafter].seconds(longest, len(drafting), unread)

    def _observe(
        self,
        anchors: Sequence[Course],
        lasts: Sequence[Course],
        budgets: Sequence[int],
        rounds: Sequence[Round],
        rows: int,
        target_s: float,
        draft_s: float,
        alone: bool,
    ) -> None:
        if alone:
            num_tokens = len(anchors) + sum(len(found.path) for found in rounds)
            self.policy.observe_step(rows, rows - len(anchors), target_s, num_tokens, draft_s)
        for course in lasts:
            self.policy.observe_rest(course.index)
        for course, budget, found in zip(anchors, budgets, rounds, strict=True):
            if self.setting.drafter is None or not budget:
                self.policy.observe_rest(course.index)
            else:
                chances = [float(node in found.path) for node in range(len(found.parents))]
                self.policy.observe_round(course.index, self.setting.drafter, budget, chances, bool(found.path), found.parents)

    def _emit(self, course: Course, count: int) -> None:
        course.tokens += count
        course.num_steps += 1
        if course.first_s is None:
            course.first_s = self.clock_s
        if course.num_emitted >= course.output_tokens:
            course.finish_s = self.clock_s
            self.running.remove(course)
            self.policy.finish(course.index)


@dataclass(frozen=True)
class Fleet:
    """Engines that share the arrivals: each request goes to the next one in turn, or to the one with the fewest unfinished."""

    replicas: int = 1
    dispatch: str = "round_robin"

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "must be at least 1")
        if self.dispatch not in DISPATCHES:
            raise ConfigError("dispatch", self.dispatch, f"choose one of {', '.join(DISPATCHES)}")


@dataclass(frozen=True)
class Ended:
    """All requests of a simulation, finished, in order of arrival, and the engines that ran them."""

    setting: Setting
    courses: tuple[Course, ...]
    replicas: tuple[Replica, ...]


def simulate(
    profile: Profile,
    jobs: Sequence[Job],
    setting: Setting,
    limits: Limits,
    seed: int = 0,
    fleet: Fleet | None = None,
    known: Known | None = None,
    watch: Callable[[Step], None] | None = None,
) -> Ended:
    """Run `jobs`, in order of arrival, to their end; the same arguments give the same result.

    `known` holds chances or records by drafter and name, for jobs that name theirs; of several records each job draws one. `watch` is
    called after each step.

    Raises:
        ConfigError: a drafter that the profile does not know.
        InputError: a prompt beyond the context, or a name without chances.
        CapacityError: a request that the cache can never hold.
    """
    fleet = fleet or Fleet()
    if setting.drafter is not None and setting.drafter not in profile.drafters:
        names = ", ".join(sorted(profile.drafters)) or "none"
        raise ConfigError("settings", setting.name, f"the profile has no cost of this drafter; it knows {names}")
    courses = tuple(_course(index, job, setting, limits, seed, known or {}) for index, job in enumerate(jobs))
    replicas = tuple(Replica(number, profile, setting, limits, watch) for number in range(fleet.replicas))
    for course in courses:
        for replica in replicas:
            replica.run_until(course.job.arrival_s)
        _choose(replicas, fleet, course).add(course)
    for replica in replicas:
        replica.run_until(float("inf"))
    return Ended(setting, courses, replicas)


def _choose(replicas: Sequence[Replica], fleet: Fleet, course: Course) -> Replica:
    if fleet.dispatch == "round_robin":
        return replicas[course.index % len(replicas)]
    return min(replicas, key=lambda replica: replica.load_at(course.job.arrival_s))


def _course(index: int, job: Job, setting: Setting, limits: Limits, seed: int, known: Known) -> Course:
    context = limits.max_context_tokens
    if context is not None and job.prompt_tokens >= context:
        raise InputError("prompt_tokens", job.prompt_tokens, f"the context holds {context} tokens; a prompt at most {context - 1}")
    output_tokens = job.output_tokens if context is None else min(job.output_tokens, context - job.prompt_tokens)
    needed = limits.footprint_tokens(job.prompt_tokens + output_tokens)
    if limits.cache_tokens is not None and needed > limits.cache_tokens // limits.block_tokens * limits.block_tokens:
        raise CapacityError(
            f"out of KV blocks: request {index} may need {needed} tokens and the cache holds {limits.cache_tokens}; raise cache_tokens"
        )
    rng = random.Random(f"{seed} {index}")
    draws = tuple(rng.random() for _ in range(output_tokens))
    order = urgency(index, job.arrival_s, job.priority, job.deadline_s, limits.aging_s)
    found = _acceptance(job, setting, known)
    if isinstance(found, Records):
        return Course(index, job, (), draws, output_tokens, order, rng.choice(found.answers))
    return Course(index, job, found, draws, output_tokens, order)


def _urgency(course: Course) -> Urgency:
    return course.urgency


def _acceptance(job: Job, setting: Setting, known: Known) -> Chances | Records:
    if setting.drafter is None:
        return (0.0,)
    if not isinstance(job.acceptance, str):
        return job.acceptance
    named = known.get(setting.drafter, {})
    if job.acceptance not in named:
        names = ", ".join(sorted(named)) or "none"
        raise InputError("acceptance", job.acceptance, f"no chances of this name were measured for {setting.drafter}; known: {names}")
    return named[job.acceptance]


def parse_setting(text: str) -> Setting:
    """The setting called `text`: plain, or a drafter and a number or auto, such as ngram-5.

    Raises:
        ConfigError: none of these.
    """
    drafter, found, number = text.rpartition("-")
    if text == PLAIN:
        return Setting()
    if not found or not drafter or not (number == "auto" or number.isdigit()):
        raise ConfigError("settings", text, "must be plain, or a drafter and a number or auto, such as ngram-5 or draft_model-auto")
    return Setting(drafter, None if number == "auto" else int(number))
