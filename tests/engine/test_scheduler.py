"""Who runs, in which order and with how many rows: the scheduler on scripted targets, where every token of cache can be
counted.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from foretoken import LLM, ConfigError, InputError, SamplingParams, SpecConfig
from foretoken.control.queue import reserve_tokens
from foretoken.core import Batch
from foretoken.draft.group import DrafterGroup
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import Scheduler, SchedulerConfig
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel
from tests.helpers.specs import key_of


class Watch:
    """An engine on a scripted target that remembers the batches of its steps; `now` is when requests arrive."""

    def __init__(self, limits: SchedulerConfig, capacity: int = 100_000) -> None:
        target = ScriptedModel(lambda context: len(context) % 3 + 1, 64, capacity=capacity)
        drafters = DrafterGroup(target)
        drafters.drafters[key_of("ngram")] = NgramDrafter()
        self.engine, self.batches, self.now = Engine(target, drafters, limits=limits), [], 0.0
        self.schedule, self.engine.scheduler.schedule = self.engine.scheduler.schedule, self.remember  # type: ignore[method-assign]

    def remember(self, plans: object) -> Batch:
        self.batches.append(self.schedule(plans))
        return self.batches[-1]

    def submit(
        self, num_prompt: int, num_tokens: int, spec: SpecConfig | None = None, **options: object
    ) -> RequestState:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **options)  # type: ignore[arg-type]
        state = self.engine.submit([1 + i % 3 for i in range(num_prompt)], params, spec or SpecConfig())
        self.engine.scheduler.remove(state.request_id)
        state.arrived_s = self.now
        self.engine.scheduler.add(state)
        return state

    def step(self, count: int = 1) -> list[dict[int, int]]:
        """Rows of committed tokens that each request ran in each step."""
        for _ in range(count):
            self.engine.step()
        return [{e.request.request_id: len(e.pending) for e in batch.entries} for batch in self.batches[-count:]]

    def finish(self) -> list[int]:
        """Run to the end; the order in which requests ended."""
        ended: list[int] = []
        while self.engine.has_work:
            ended += [output.request_id for output in self.engine.step() if output.finish_reason is not None]
        check_idle(self.engine)
        return ended


# ---- who may join


def test_a_request_joins_when_its_text_fits_and_a_reserve_stays() -> None:
    """Not its whole course: 30 of 100 tokens each, 90 in the end; a quarter of the cache stays free."""
    watch = Watch(SchedulerConfig(cache_reserve=0.25), capacity=100)
    for _ in range(3):
        watch.submit(30, 60)
    assert watch.step() == [{0: 30, 1: 30}]
    assert [s.request_id for s in watch.engine.scheduler.waiting] == [2]
    assert watch.finish() == [0, 1, 2]


def test_what_is_admitted_but_not_read_counts() -> None:
    """Long prompts that are read in pieces: the same cache is not promised twice."""
    watch = Watch(SchedulerConfig(max_prompt_tokens=4, cache_reserve=0.1), capacity=100)
    for _ in range(4):
        watch.submit(40, 3)
    watch.step(3)
    assert list(watch.engine.scheduler.running) == [0, 1]
    assert watch.finish() == [0, 1, 2, 3]
    assert watch.engine.stats.num_preempted == 0


def test_who_is_alone_may_use_the_whole_cache() -> None:
    watch = Watch(SchedulerConfig(cache_reserve=1.0), capacity=40)
    watch.submit(35, 5)
    watch.submit(39, 1)
    assert watch.finish() == [0, 1]


def test_a_shared_beginning_is_not_counted_twice(pair: SimpleNamespace) -> None:
    """Two requests of 12 blocks with 11 in common fit into 16; two others do not."""
    target = PagedModel(load_decoder(pair.target), 64, 4)
    engine = Engine(target, DrafterGroup(target), limits=SchedulerConfig(cache_reserve=0.0))
    prompt, params = token_ids(46, seed=1), SamplingParams(max_tokens=2, ignore_eos=True)
    for prompts, together in (
        ([prompt, [*prompt[:44], 1, 2]], 2),
        ([prompt[::-1], [*prompt[:40:-1], *prompt[:41]]], 1),
    ):
        first, second = (engine.submit(one, params, SpecConfig()) for one in prompts)
        engine.step()
        assert list(engine.scheduler.running) == [first.request_id]
        engine.scheduler.admit()
        assert len(engine.scheduler.running) == together
        while engine.has_work:
            engine.step()
        assert second.stats.num_preempted == 0
    check_idle(engine)


# ---- order


def test_priorities_and_deadlines_order_the_queue() -> None:
    watch = Watch(SchedulerConfig(max_batch_size=1))
    watch.submit(3, 2, priority=2)
    watch.submit(3, 2)
    watch.submit(3, 2, deadline_s=9.0)
    watch.submit(3, 2, deadline_s=4.0)
    watch.submit(3, 2, priority=-1)
    assert watch.finish() == [4, 3, 2, 1, 0]


def test_nobody_starves() -> None:
    """Twice as many urgent requests as can be served, without end: a patient one is passed only by those that came soon
    after it.
    """
    watch = Watch(SchedulerConfig(max_batch_size=1, aging_s=10.0))
    patient = watch.submit(3, 2, priority=2)
    for _ in range(70):
        watch.submit(3, 2, priority=0, deadline_s=0.5)
        watch.engine.step()
        watch.now += 1.0
    assert patient.finish_reason == "length"
    first = [entry.request.request_id for batch in watch.batches for entry in batch.entries].index(0)
    assert first == 2 * 30  # 30 came within three periods
    watch.finish()


def test_the_least_urgent_gives_way() -> None:
    """Whoever came first among equals stays; urgency wins over arrival; the victim comes back before later ones of its
    kind.
    """
    watch = Watch(SchedulerConfig(cache_reserve=0.0), capacity=64)
    patient, first, second = watch.submit(20, 10, priority=1), watch.submit(20, 10), watch.submit(20, 10)
    watch.step(3)
    assert [state.stats.num_preempted for state in (patient, first, second)] == [1, 0, 0]
    later = watch.submit(20, 10, priority=1)
    assert watch.engine.scheduler.waiting == [patient, later]
    assert watch.finish() == [1, 2, 0, 3]
    assert watch.engine.stats.num_preempted == 1
    assert watch.engine.stats.num_recomputed_tokens == 21


def test_a_resumed_answer_goes_on_with_a_decode_step() -> None:
    """All but the last token is read again in pieces that say nothing; then it may draft like any other request."""
    watch = Watch(SchedulerConfig(max_prompt_tokens=16, cache_reserve=0.0), capacity=64)
    watch.submit(30, 18)
    state = watch.submit(20, 18, SpecConfig("ngram", num_draft=2))
    while not state.stats.num_preempted:
        watch.step()
    num_steps, num_tokens, before = state.stats.num_steps, len(state.tokens), len(watch.batches)
    watch.finish()
    own = [entry for batch in watch.batches[before:] for entry in batch.entries if entry.request.request_id == 1]
    reading = [entry for entry in own if not entry.decodes]
    assert sum(len(entry.pending) for entry in reading) == num_tokens - 1
    assert [entry.num_draft for entry in reading] == [0] * len(reading)
    first = own[len(reading)]
    assert (first.start, len(first.pending), first.decodes, first.num_draft) == (num_tokens - 1, 1, True, 2)
    assert state.stats.num_steps == num_steps + len(own) - len(reading)


# ---- chunks and the token budget


def test_a_short_prompt_goes_along_with_a_long_one() -> None:
    """And many short ones do not stop it: it has three quarters of every step."""
    watch = Watch(SchedulerConfig(max_prompt_tokens=40))
    long = watch.submit(400, 2)
    watch.step()
    for _ in range(30):
        watch.submit(5, 2)
    steps = watch.step(5)
    assert all(step[0] == 30 and len([1 for rows in step.values() if rows == 5]) == 2 for step in steps)
    watch.finish()
    assert long.finish_reason == "length"


def test_answers_go_on_at_a_bounded_pace_while_prompts_are_read() -> None:
    """No step has more rows than allowed, everyone who decodes is in every step, and the prompt gets on in every
    step.
    """
    watch = Watch(SchedulerConfig(4, 256, max_step_tokens=24))
    answering = [watch.submit(3, 60, SpecConfig("ngram", num_draft=12)) for _ in range(3)]
    watch.step(2)
    long = watch.submit(200, 4)
    while not long.provenance:
        (rows,) = watch.step()
        batch = watch.batches[-1]
        assert {entry.request.request_id for entry in batch.decoding} >= {
            state.request_id for state in answering if state.finish_reason is None
        }
        assert sum(len(entry.pending) + entry.num_draft for entry in batch.entries) <= 24
        assert rows[long.request_id] >= 5
    assert len(watch.batches) < 45
    watch.finish()


# ---- loans


def test_whoever_asks_for_an_answer_comes_before_background_work() -> None:
    """Cache is lent while it is free beyond the reserve, and taken back when rows or a newcomer need it."""
    watch = Watch(SchedulerConfig(cache_reserve=0.1), capacity=100)
    scheduler, target, returned = watch.engine.scheduler, watch.engine.target, []

    def lend(num_tokens: int) -> bool:
        def give_back() -> None:
            returned.append(num_tokens)
            target.close(-1)
            scheduler.give_back()

        if not scheduler.borrow(num_tokens, give_back):
            return False
        target.open(-1)
        target.sequences[-1] = [0] * num_tokens  # type: ignore[attr-defined]
        return True

    watch.submit(20, 40)
    assert not lend(1)  # somebody waits
    watch.step()
    assert not lend(71)
    assert lend(60)
    assert not scheduler.borrow(1, lambda: None)  # one loan at a time
    watch.submit(40, 2)  # a newcomer
    watch.step()
    assert returned == [60]
    watch.finish()
    watch.submit(20, 70)
    watch.step()
    assert lend(60)
    watch.finish()  # rows that do not fit
    assert returned == [60, 60]
    assert watch.engine.stats.num_preempted == 0


# ---- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_step_tokens": 0}, "max_step_tokens=0"),
        ({"max_step_tokens": 16}, "max_step_tokens=16: must be more than max_batch_size, 16"),
        ({"max_step_tokens": "many"}, "max_step_tokens='many'"),
        ({"cache_reserve": 2}, "cache_reserve=2"),
        ({"cache_reserve": None}, "cache_reserve=None"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/nowhere", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 0.5}, "priority=0.5: must be a whole number"),
        ({"priority": 101}, "priority=101"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"deadline_s": "soon"}, "deadline_s='soon': must be a finite number"),
    ],
)
def test_priorities_and_deadlines_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**options)  # type: ignore[arg-type]


# ---- admission takes time by those who join, and decides as if it looked at all that run


def fits_by_all(scheduler: Scheduler, num_tokens: int) -> bool:
    """`Queue.fits` from every running request."""
    footprint, length = scheduler.target.footprint_tokens, scheduler.target.length
    owed = sum(footprint(one.num_tokens) - footprint(length(one.request_id)) for one in scheduler.running.values())
    reserved = reserve_tokens(scheduler.config, scheduler.target.capacity_tokens) if scheduler.running else 0
    return num_tokens + owed + reserved <= scheduler.target.num_free_tokens()


def will_share_by_all(scheduler: Scheduler, state: RequestState) -> bool:
    """`Scheduler._will_share` from every running request's tokens."""
    size, length = scheduler.target.footprint_tokens(1), scheduler.target.length
    return any(
        scheduler.key(other) < scheduler.key(state)
        and state.num_tokens > size
        and other.tokens[:size] == state.tokens[:size]
        and other.request.params.tenant == state.request.params.tenant
        and length(other.request_id) < min(other.num_tokens - 1, state.num_tokens - 1) // size * size
        for other in scheduler.running.values()
    )


@pytest.mark.parametrize("seed", range(4))
def test_admission_decides_as_if_it_looked_at_all_that_run(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random queues of texts that begin alike, with preemptions: each decision beside the one from all requests."""
    rng, seen = random.Random(seed), Counter[tuple[str, bool]]()
    fits, will_share = Scheduler.fits, Scheduler._will_share

    def checked(name: str, found: bool, expected: bool) -> bool:
        assert found == expected
        seen[name, found] += 1
        return found

    monkeypatch.setattr(
        Scheduler, "fits", lambda own, count: checked("fits", fits(own, count), fits_by_all(own, count))
    )
    monkeypatch.setattr(
        Scheduler,
        "_will_share",
        lambda own, state: checked("share", will_share(own, state), will_share_by_all(own, state)),
    )
    target = PagedModel(load_decoder(pair.target), 160, 4)
    limits = SchedulerConfig(8, 24, cache_reserve=0.1)
    engine, beginnings = Engine(target, DrafterGroup(target), limits=limits), [token_ids(20, seed=i) for i in range(3)]
    for _ in range(12):
        for _ in range(rng.randrange(8)):
            prompt = rng.choice(beginnings)[: rng.randrange(1, 20)]
            prompt += token_ids(rng.randrange(1, 8), seed=rng.randrange(9))
            params = SamplingParams(
                max_tokens=rng.randrange(1, 24), priority=rng.randrange(2), tenant=rng.choice("ab"), ignore_eos=True
            )
            engine.submit(prompt, params, SpecConfig())
        for _ in range(rng.randrange(6)):
            engine.step()
    while engine.has_work:
        engine.step()
    check_idle(engine)
    assert engine.stats.num_preempted
    assert all(seen[name, found] for name in ("fits", "share") for found in (False, True)), seen


def test_admitting_many_looks_at_each_running_request_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, looks = Watch(SchedulerConfig(400, 10_000)), [0]
    length = watch.engine.target.length

    def counted(request_id: int) -> int:
        looks[0] += 1
        return length(request_id)

    for _ in range(400):
        watch.submit(5, 3)
    monkeypatch.setattr(watch.engine.target, "length", counted)
    watch.engine.scheduler.admit()
    assert len(watch.engine.scheduler.running) == 400
    assert looks[0] < 4 * 400
