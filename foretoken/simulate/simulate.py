"""Requests that arrive, engines that share them, and the virtual time in which all of it happens.

An engine has no model: it is the engine's own queue and chooser, with the times of steps from a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from foretoken.control.candidates import NO_DRAFT, DraftBudget, Preview, PreviewAsk, Previews, RoundOutcome, StepOutcome
from foretoken.control.chooser import Chooser
from foretoken.control.config import DEFAULT, PolicyConfig
from foretoken.control.queue import Queue
from foretoken.errors import ConfigError
from foretoken.option import Settings, check_fields
from foretoken.plan.profile import Profile
from foretoken.simulate.inputs import Job, Limits, SimSetting
from foretoken.simulate.sim_request import Known, Record, Round, SimRequest, start

DISPATCHES = ("round_robin", "least_loaded")
_setting = Settings()


@dataclass(frozen=True)
class Fleet:
    """Engines that share the arrivals: each request goes to the next one, or to that with the fewest unfinished."""

    replicas: int = _setting(1, "Engines that share the requests.")
    dispatch: str = _setting("round_robin", "How requests are assigned to replicas: {choices}.", choices=DISPATCHES)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "must be at least 1")
        check_fields(self)


@dataclass(frozen=True)
class Ended:
    """All requests of a simulation, finished, in order of arrival, and the engines that ran them."""

    setting: SimSetting
    requests: tuple[SimRequest, ...]
    engines: tuple[SimEngine, ...]


def simulate(
    profile: Profile,
    jobs: Sequence[Job],
    setting: SimSetting,
    limits: Limits,
    seed: int = 0,
    fleet: Fleet | None = None,
    known: Known | None = None,
    watch: Callable[[Step], None] | None = None,
    config: PolicyConfig = DEFAULT,
) -> Ended:
    """Run `jobs`, in order of arrival, to their end; the same arguments give the same result.

    `known` holds chances or records by drafter and name, for jobs that name theirs; of several records each job draws
    one. `watch` is called after each step; `config` are the policy's constants.

    Raises:
        ConfigError: a drafter that the profile does not know.
        InputError: a prompt beyond the context, or a name without chances.
        CapacityError: a request that the cache can never hold.
    """
    fleet = fleet or Fleet()
    setting.check_with(profile)
    requests = tuple(start(index, job, setting, limits, seed, known or {}) for index, job in enumerate(jobs))
    engines = tuple(SimEngine(number, profile, setting, limits, watch, config) for number in range(fleet.replicas))
    for request in requests:
        for engine in engines:
            engine.run_until(request.job.arrival_s)
        _choose(engines, fleet, request).add(request)
    for engine in engines:
        engine.run_until(float("inf"))
    return Ended(setting, requests, engines)


def _choose(engines: Sequence[SimEngine], fleet: Fleet, request: SimRequest) -> SimEngine:
    if fleet.dispatch == "round_robin":
        return engines[request.request_id % len(engines)]
    return min(engines, key=lambda engine: engine.load_at(request.job.arrival_s))


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


class _SimCache:
    """A `queue.Cache`: what each running request holds, counted in tokens and whole blocks."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.held = limits, dict[int, int]()

    @property
    def capacity_tokens(self) -> float:
        return self.limits.capacity_tokens

    def footprint_tokens(self, num_tokens: int) -> int:
        return self.limits.footprint_tokens(num_tokens)

    def num_free_tokens(self) -> float:
        return self.limits.capacity_tokens - sum(self.limits.footprint_tokens(held) for held in self.held.values())

    def length(self, request_id: int) -> int:
        return self.held[request_id]

    def open(self, request_id: int) -> None:
        self.held[request_id] = 0

    def close(self, request_id: int) -> None:
        del self.held[request_id]


@dataclass(frozen=True)
class _Part:
    """A request's part in a step: a row and draft tokens under its budget (`decodes`), or `num_read` tokens of text."""

    request: SimRequest
    decodes: bool
    num_read: int = 0
    budget: DraftBudget = NO_DRAFT
    round: Round = field(default_factory=Round)

    @property
    def num_emitted(self) -> int:
        """Tokens that come out, the first one behind the last of a prompt."""
        return len(self.round.path) + 1


@dataclass
class SimEngine:
    """One engine: its queue, its clock and its chooser."""

    number: int
    profile: Profile
    setting: SimSetting
    limits: Limits
    watch: Callable[[Step], None] | None = None
    config: PolicyConfig = DEFAULT
    clock_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    chooser: Chooser = field(init=False)
    queue: Queue[SimRequest] = field(init=False)
    requests: list[SimRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = Chooser(lambda: 0.0, config=self.config)  # deciding takes no time here
        self.cache = _SimCache(self.limits)
        self.queue = Queue(self.cache, self.limits)

    def add(self, request: SimRequest) -> None:
        """Queue a request at its arrival; an idle engine begins with it at once."""
        if not self.has_work:
            self.clock_s = max(self.clock_s, request.job.arrival_s)
        self.queue.enqueue(request, request.urgency)
        self.requests.append(request)

    def run_until(self, time_s: float) -> None:
        """Run every step that begins before `time_s`."""
        while self.has_work and self.clock_s < time_s:
            self.step()

    def load_at(self, time_s: float) -> int:
        """Requests that came and were not finished at `time_s`."""
        self.requests = [one for one in self.requests if one.finish_s is None or one.finish_s > time_s]
        return len(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.queue.waiting or self.queue.running)

    def step(self) -> None:
        """One step of the engine: admit, preview, schedule, draft and verify, observe, emit."""
        self.queue.admit()
        decoding = self.queue.decoding()
        views = [request.view(self.clock_s) for request in decoding]
        previews = self._preview(decoding, self.chooser.begin(views))
        budgets = self.chooser.plan(views, previews)
        parts = self._parts(dict(zip((view.request_id for view in views), budgets, strict=True)))
        preempted = tuple(request.request_id for request in self.queue.preempted)
        for request in self.queue.preempted:
            request.num_preempted += 1
            request.read_by.clear()
        outcome, target_s = self._run(parts, previews)
        draft_s = sum(outcome.draft_s.values()) + previews.seconds
        self.chooser.observe(outcome)
        start_s, seconds = self.clock_s, draft_s + target_s
        self.clock_s += seconds
        self.busy_s += seconds
        self.num_steps += 1
        emitted = [(part.request, part.num_emitted) for part in parts if self._commit(part)]
        for request, count in emitted:
            self._emit(request, count)
        if self.watch is not None:
            pairs = tuple((request.request_id, count) for request, count in emitted)
            read = sum(part.num_read for part in parts)
            rows = sum(1 + len(part.round.parents) for part in parts if part.decodes)
            self.watch(Step(self.number, start_s, seconds, draft_s, rows, read, pairs, preempted))

    def _preview(self, decoding: Sequence[SimRequest], asks: Sequence[PreviewAsk]) -> Previews:
        by_id = {request.request_id: request for request in decoding}
        shown: dict[int, dict[int, Preview]] = {}
        seconds = 0.0
        for ask in asks:
            request = by_id[ask.request_id]
            source = request.recorded[ask.option]
            assert isinstance(source, Record)
            preview = source.preview_at(request.num_emitted - 1, ask.num_draft)
            shown.setdefault(ask.request_id, {})[ask.option] = preview
            seconds += source.preview_s
        return Previews(shown, seconds)

    def _parts(self, budgets: dict[int, DraftBudget]) -> list[_Part]:
        """What each request does in the step, most urgent first, those that decode before those that read."""
        decode: list[_Part] = []
        read: list[_Part] = []
        for request, rows in self.queue.rows(budgets):
            if rows.decodes:
                budget = DraftBudget(budgets[request.request_id].option, rows.num_draft)
                decode.append(_Part(request, True, 0, budget, request.draft_round(budget.option, budget.num_draft)))
            elif rows.num_pending:
                read.append(_Part(request, False, rows.num_pending))
        return decode + read

    def _run(self, parts: Sequence[_Part], previews: Previews) -> tuple[StepOutcome, float]:
        """What came of the parts, and what the target took."""
        decode = [part for part in parts if part.decodes]
        read = [part for part in parts if not part.decodes]
        rows = len(decode) + sum(len(part.round.parents) for part in decode)
        contexts = [self.cache.held[part.request.request_id] for part in (*decode, *read)]
        target_s = self.profile.step_s(rows, contexts, sum(part.num_read for part in read))
        draft_s, num_read = self._draft(decode, previews)
        lasts = [part for part in read if self._reads_last(part)]
        outcome = StepOutcome(
            rounds=[_outcome(part) for part in (*decode, *lasts)],
            only_decodes=not read,
            num_rows=rows,
            num_nodes=rows - len(decode),
            target_s=target_s,
            draft_s=draft_s,
            num_read_tokens=num_read,
        )
        return outcome, target_s

    def _draft(self, decode: Sequence[_Part], previews: Previews) -> tuple[dict[Hashable, float], dict[Hashable, int]]:
        """Seconds of each drafter, and tokens that are new to it: a text that it has not seen is read first."""
        draft_s: dict[Hashable, float] = {}
        num_read: dict[Hashable, int] = {}
        for number, drafter in enumerate(self.setting.drafters):
            users = [part for part in decode if part.budget.option == number and part.budget.num_draft]
            users = [part for part in users if number not in previews.of(part.request.request_id)]  # paid for before
            if not users:
                continue
            lookups = [source for part in users if isinstance(source := part.request.recorded[number], Record)]
            if self.setting.num_draft is None and any(source.previews for source in lookups):
                draft_s[drafter] = sum(source.preview_s for source in lookups)
                continue
            unread = [part.request for part in users if number not in part.request.read_by]
            num_read[drafter] = sum(request.num_tokens for request in unread)
            for request in unread:
                request.read_by.add(number)
            longest = max(part.budget.num_draft for part in users)
            draft_s[drafter] = self.profile.drafters[drafter].seconds(longest, len(users), num_read[drafter])
        return draft_s, num_read

    def _reads_last(self, part: _Part) -> bool:
        return self.cache.held[part.request.request_id] + part.num_read == part.request.num_tokens

    def _commit(self, part: _Part) -> bool:
        """Keep what the step computed; whether the request emits."""
        request = part.request
        if not part.decodes:
            is_last = self._reads_last(part)
            self.cache.held[request.request_id] += part.num_read
            return is_last
        self.cache.held[request.request_id] = request.num_tokens + len(part.round.path)
        request.num_drafted += len(part.round.parents)
        request.num_accepted += len(part.round.path)
        return True

    def _emit(self, request: SimRequest, count: int) -> None:
        request.num_tokens += count
        request.num_steps += 1
        if request.first_s is None:
            request.first_s = self.clock_s
        if request.num_emitted >= request.output_tokens:
            request.finish_s = self.clock_s
            self.cache.close(request.request_id)
            self.queue.remove(request.request_id)
            self.chooser.finish(request.request_id)


def _outcome(part: _Part) -> RoundOutcome:
    accepted = set(part.round.path)
    return RoundOutcome(
        request_id=part.request.request_id,
        budget=part.budget,
        chances=[float(node in accepted) for node in range(len(part.round.parents))],
        parents=part.round.parents,
        path=part.round.path,
        emitted=part.request.emitted(part.num_emitted) if part.decodes else (0,),
    )
