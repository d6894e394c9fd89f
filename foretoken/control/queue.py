"""Which requests run, in which order, and how many rows each gets in a step.

The engine's scheduler and the simulator both ask here. Everything is counted in tokens; a cache in blocks says with its
`footprint` what a sequence of so many tokens takes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from foretoken.control.candidates import NO_DRAFT, DraftBudget
from foretoken.errors import ConfigError
from foretoken.option import Settings

Urgency = tuple[int, float, int]  # smaller is served earlier: level, when the answer is wanted, order of arrival
Footprint = Callable[[int], int]

# A quarter: of a step's rows that prompts get at least, of the prompts' rows that short ones may take from the first.
_SHARE = 4
BATCHES = "Batches"  # the group of the scheduler's options
_setting = Settings(BATCHES)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of the cache.

    At most `max_batch_size` requests run at once. A step takes at most `max_prompt_tokens` tokens of prompts, and at
    most `max_step_tokens` rows: prompts, draft tokens, and a row for each request that decodes (None: only the other
    limits apply). A request starts only if `cache_reserve`, a share of the cache, stays free for those that run. A
    request that came `aging_s` seconds earlier counts as one whose priority is better by 1.
    """

    max_batch_size: int = _setting(16, "Most answers that run at once.")
    max_prompt_tokens: int = _setting(512, "Most prompt tokens in a step.")
    _: KW_ONLY
    max_step_tokens: int | None = _setting(
        None, "Most rows of a step: prompts, draft tokens, and one for each answer; without it, no limit."
    )
    # who speculates grows by several tokens a step
    cache_reserve: float = _setting(0.15, "Share of the cache that must stay free when a new answer begins.")
    aging_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.max_step_tokens is not None and self.max_step_tokens <= self.max_batch_size:
            remedy = (
                f"must be more than max_batch_size, {self.max_batch_size}: "
                "each running request takes a row, and prompts need one"
            )
            raise ConfigError("max_step_tokens", self.max_step_tokens, remedy)
        if not 0 <= self.cache_reserve <= 1:
            raise ConfigError("cache_reserve", self.cache_reserve, "must be a number from 0 to 1")
        if not (math.isfinite(self.aging_s) and self.aging_s > 0):
            raise ConfigError("aging_s", self.aging_s, "must be a number of seconds above 0")


def urgency(number: int, arrived_s: float, priority: int, deadline_s: float | None, aging_s: float) -> Urgency:
    """The one order of service: of the queue, of prompt chunks, and backwards of who gives way.

    It never changes while a request is there, so two requests cannot take turns at displacing each other. A period of
    `aging_s` counts as much as 1 of `priority`: a request is passed only by those that came soon after. Within a period
    the earliest deadline goes first (`deadline_s` after arrival; none comes last), then who came first.
    """
    return (
        priority + math.floor(arrived_s / aging_s),
        math.inf if deadline_s is None else arrived_s + deadline_s,
        number,
    )


def reserve_tokens(config: SchedulerConfig, capacity_tokens: float) -> float:
    """What stays free when somebody joins; an endless cache needs nothing."""
    return config.cache_reserve * capacity_tokens if math.isfinite(capacity_tokens) else 0.0


def may_join(needed_tokens: int, owed_tokens: int, reserved_tokens: float, free_tokens: float) -> bool:
    """Whether `needed_tokens` fit beside the reserve and the `owed_tokens` that running requests have yet to read."""
    return needed_tokens + owed_tokens + reserved_tokens <= free_tokens


class Rows(NamedTuple):
    """What a running request could do in a step, or may do: its cache holds `held` tokens.

    Either it decodes: one row (`num_pending` is 1), at most `num_draft` draft tokens and `num_probe` probes; or it
    reads, `num_pending` tokens at most (0: it sits this step out). `is_fixed`: its draft tokens may not depend on
    neighbours.
    """

    held: int
    num_pending: int
    decodes: bool
    num_draft: int = 0
    num_probe: int = 0
    is_fixed: bool = False

    @property
    def num_rows(self) -> int:
        """All of it."""
        return self.num_pending + self.num_draft + self.num_probe


def within_budget(asks: Sequence[Rows], config: SchedulerConfig) -> list[Rows]:
    """The rows of a step, `asks` most urgent first: a row for everyone who decodes, draft tokens, and prompts with what
    is left.

    Prompts get a quarter of what the first leave, if they want so much. Draft tokens are cut from the least urgent on,
    but fixed ones: those have what they would have in a full batch, whatever else runs.
    """
    wanted = sum(ask.num_pending for ask in asks if not ask.decodes)
    prompt_tokens = min(wanted, config.max_prompt_tokens)
    grants = list(asks)
    if config.max_step_tokens is not None:
        left = config.max_step_tokens - sum(ask.decodes for ask in asks)
        room, own = left - min(prompt_tokens, _least(left)), fixed_rows(config)
        room -= sum(_cut(ask, own).num_rows - 1 for ask in asks if ask.decodes and ask.is_fixed)
        for place, ask in enumerate(asks):
            if ask.decodes:
                grants[place] = _cut(ask, own if ask.is_fixed else room)
                room -= 0 if ask.is_fixed else grants[place].num_rows - 1
        decoding = sum(grant.num_rows for grant in grants if grant.decodes)
        prompt_tokens = min(prompt_tokens, config.max_step_tokens - decoding)
    reading = [place for place, ask in enumerate(asks) if not ask.decodes]
    lengths = chunks([asks[place].num_pending for place in reading], prompt_tokens) if reading else []
    for place, length in zip(reading, lengths, strict=True):
        grants[place] = asks[place]._replace(num_pending=length)
    return grants


def fixed_rows(config: SchedulerConfig) -> int:
    """Draft tokens and probes that a request may have beside any neighbours: an equal share of a full batch's."""
    assert config.max_step_tokens is not None
    left = config.max_step_tokens - config.max_batch_size
    return (left - _least(left)) // config.max_batch_size


def chunks(missing: Sequence[int], budget: int) -> list[int]:
    """How much of each text is read in a step, most urgent first, `budget` tokens together.

    The first takes what it can, but a quarter goes to later ones that are thereby read to their end: a short prompt
    does not wait for a long one, nor can many short ones stop it.
    """
    lengths, spare = [0] * len(missing), budget // _SHARE
    for place, count in enumerate(missing[1:], 1):
        if count <= spare:
            lengths[place] = count
            spare -= count
    left = budget - sum(lengths)
    for place, count in enumerate(missing):
        if not lengths[place]:
            lengths[place] = min(count, left)
            left -= lengths[place]
    return lengths


def growth_tokens(rows: Sequence[Rows], footprint: Footprint) -> int:
    """Free tokens that the rows of a step take."""
    return sum(_growth(own, footprint) for own in rows)


def within_cache(rows: Sequence[Rows], free_tokens: float, footprint: Footprint) -> list[Rows] | None:
    """`rows` cut until they fit into `free_tokens`, most urgent first; None: the least urgent has to give way.

    First go draft tokens and probes that take room of their own, then what is read, each from the least urgent on. The
    most urgent goes on reading, if only by a row. Fixed draft tokens are never cut: neighbours would have a say in what
    a seed draws.
    """
    cut = list(rows)
    excess = growth_tokens(cut, footprint) - free_tokens
    for place, own in reversed(list(enumerate(cut))):
        if excess > 0 and own.decodes and not own.is_fixed:
            cut[place] = _cut(own, footprint(own.held + 1) - own.held - 1)
            excess -= _growth(own, footprint) - _growth(cut[place], footprint)
    for place, own in reversed(list(enumerate(cut))):
        if excess > 0 and not own.decodes:
            room = footprint(own.held) + max(0, _growth(own, footprint) - math.ceil(excess)) - own.held
            cut[place] = own._replace(num_pending=max(min(own.num_pending, room), int(place == 0)))
            excess -= _growth(own, footprint) - _growth(cut[place], footprint)
    return None if excess > 0 and len(rows) > 1 else cut


def _least(left: int) -> int:
    """Rows that prompts get of `left` at least."""
    return max(1, left // _SHARE)


def _cut(rows: Rows, room: int) -> Rows:
    """At most `room` draft tokens and probes, draft tokens first."""
    if rows.num_draft + rows.num_probe <= room:
        return rows
    num_draft = min(rows.num_draft, max(0, room))
    return rows._replace(num_draft=num_draft, num_probe=min(rows.num_probe, max(0, room - num_draft)))


def _growth(rows: Rows, footprint: Footprint) -> int:
    return footprint(rows.held + count) - footprint(rows.held) if (count := rows.num_rows) else 0


class Cache(Protocol):
    """The memory that running requests share, counted in tokens."""

    @property
    def capacity_tokens(self) -> float:
        """All of it."""

    def footprint_tokens(self, num_tokens: int) -> int:
        """What a sequence of so many tokens takes."""

    def num_free_tokens(self) -> float:
        """What is free."""

    def length(self, request_id: int) -> int:
        """Tokens held for a request."""

    def open(self, request_id: int) -> None:
        """Begin to hold a request."""

    def close(self, request_id: int) -> None:
        """Give back what is held for it."""


class Queued(Protocol):
    """A request as the queue sees it."""

    @property
    def request_id(self) -> int:
        """Its number."""

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""

    @property
    def has_emitted(self) -> bool:
        """Whether its answer has begun: then it reads all but its last token, whose row is a decode step."""


QueuedT = TypeVar("QueuedT", bound=Queued)


class Queue(Generic[QueuedT]):
    """Serves the most urgent first, under the limits of `SchedulerConfig` and the cache.

    A step is `admit`, `decoding` and `rows`. `preempted` are those of the latest step. The engine's scheduler and the
    simulator drive this class; what only a real cache can do, such as adopting prefixes, overrides the steps below.
    """

    def __init__(self, cache: Cache, config: SchedulerConfig) -> None:
        self.cache, self.config = cache, config
        self.waiting: list[QueuedT] = []  # most urgent first
        self.running: dict[int, QueuedT] = {}
        self.preempted: list[QueuedT] = []
        self.urgencies: dict[int, Urgency] = {}
        self._owed_tokens: int | None = None  # known while requests join: each adds its own

    def enqueue(self, request: QueuedT, urgency_: Urgency | None = None) -> None:
        """Queue a request, with its urgency when it is new."""
        if urgency_ is not None:
            self.urgencies[request.request_id] = urgency_
        insort(self.waiting, request, key=self.key)

    def key(self, request: QueuedT) -> Urgency:
        """The order of service."""
        return self.urgencies[request.request_id]

    def remove(self, request_id: int) -> QueuedT | None:
        """Take a request out, running or waiting; None if it is unknown."""
        found = self.running.pop(request_id, None)
        if found is None and request_id in self.urgencies:
            place = bisect_left(self.waiting, self.urgencies[request_id], key=self.key)
            if place < len(self.waiting) and self.waiting[place].request_id == request_id:
                found = self.waiting.pop(place)
        self.urgencies.pop(request_id, None)
        return found

    def admit(self) -> None:
        """Begin a step: let waiting requests join, in their order; small ones do not pass one that needs room."""
        self.preempted = []
        self.make_way()
        if not self.waiting or len(self.running) >= self.config.max_batch_size:
            return
        self._owed_tokens = self._owed(self.running.values())
        try:
            while self.waiting and len(self.running) < self.config.max_batch_size:
                place = self.next_place()
                if place is None:
                    return
                request = self.waiting[place]
                self.join(place)
                self._owed_tokens += self._owed((request,))
        finally:
            self._owed_tokens = None

    def decoding(self) -> list[QueuedT]:
        """The running requests that decode next, most urgent first."""
        return [one for one in self._ordered() if self.decodes(one)]

    def rows(self, budgets: Mapping[int, DraftBudget]) -> list[tuple[QueuedT, Rows]]:
        """Rows of every request, most urgent first; the last ones are preempted until those of the others fit."""
        requests = self._ordered()
        asks = [self._asked(one, budgets.get(one.request_id, NO_DRAFT)) for one in requests]
        footprint = self.cache.footprint_tokens
        while True:
            del asks[len(requests) :]
            granted = within_budget(asks, self.config)
            if growth_tokens(granted, footprint) > self.cache.num_free_tokens():
                self.gather(requests)
                fitting = within_cache(granted, self.cache.num_free_tokens(), footprint)
                if fitting is None:
                    self.preempt(requests.pop())
                    continue
                granted = fitting
            return list(zip(requests, granted, strict=True))

    def decodes(self, request: QueuedT) -> bool:
        """Whether only its last token is missing in the cache."""
        return self.cache.length(request.request_id) == request.num_tokens - 1

    # ---- steps that a real cache refines

    def make_way(self) -> None:
        """Whatever is to be done before requests join."""

    def next_place(self) -> int | None:
        """Place in the queue of the request that may join now, if there is one."""
        return None if self.running and not self.fits(self._footprint(self.waiting[0])) else 0

    def join(self, place: int) -> None:
        """Let the request at `place` of the queue run."""
        request = self.waiting[place]
        self.cache.open(request.request_id)
        del self.waiting[place]
        self.running[request.request_id] = request

    def gather(self, requests: Sequence[QueuedT]) -> None:
        """Take back cache that can be had without preempting anybody."""

    def preempt(self, request: QueuedT) -> None:
        """Close a running request's sequence and queue it again; its text and all that came out of it stay."""
        self.cache.close(request.request_id)
        self.enqueue(request)
        del self.running[request.request_id]
        self.preempted.append(request)

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens fit beside what running requests have yet to read, and the reserve."""
        owed = self._owed(self.running.values()) if self._owed_tokens is None else self._owed_tokens
        reserved = reserve_tokens(self.config, self.cache.capacity_tokens) if self.running else 0
        return may_join(num_tokens, owed, reserved, self.cache.num_free_tokens())

    def _owed(self, requests: Iterable[QueuedT]) -> int:
        """Tokens that running requests have yet to read."""
        footprint, length = self.cache.footprint_tokens, self.cache.length
        return sum(footprint(one.num_tokens) - footprint(length(one.request_id)) for one in requests)

    def _footprint(self, request: QueuedT) -> int:
        return self.cache.footprint_tokens(request.num_tokens)

    def _ordered(self) -> list[QueuedT]:
        return sorted(self.running.values(), key=self.key)

    def _asked(self, request: QueuedT, budget: DraftBudget) -> Rows:
        held = self.cache.length(request.request_id)
        missing = request.num_tokens - held
        if missing == 1:
            return Rows(held, 1, True, budget.num_draft, budget.num_probe, budget.is_fixed)
        return Rows(held, missing - request.has_emitted, False)
