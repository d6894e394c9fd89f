"""The counters: requests add up to the engine whatever becomes of them, and time, waste and gain are what a hand
gets.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.control.candidates import DrafterOption
from foretoken.control.cost import CostTable
from foretoken.core import Batch, BatchEntry, Draft, Probes, Request, Verdict
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import GRAMMAR, DrafterGroup, drafter_key, own_drafters
from foretoken.draft.ngram import NgramDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.engine.stats import Counters, EngineStats, RequestStats, RoundCounts
from foretoken.engine.time_attribution import charge, gain
from foretoken.engine.views import outcome_of
from foretoken.engine.watch import StepClock
from foretoken.plan.profile import Curve
from tests.helpers.checkpoints import token_ids
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.specs import key_of

NGRAM, DRAFT = SpecConfig("ngram"), SpecConfig("draft_model", "d", num_draft=4)
SUMS = [field.name for field in fields(Counters) if field.name not in ("num_steps", "near_tie_gap", "longest_gap_s")]


def counting(context: tuple[int, ...]) -> list[float]:
    """Counts upwards; a context that holds a 9 and is 15 tokens long has no distribution."""
    if 9 in context and len(context) >= 15:
        return [float("nan")] * 20
    return [30.0 * (token == (context[-1] + 1) % 7) for token in range(20)]


def engine_of(limits: SchedulerConfig | None = None) -> Engine:
    """An engine whose draft model errs at every 5 and whose target breaks where `counting` says so."""
    target = ScriptedModel(counting, 20)
    drafters = DrafterGroup(target)
    draft = ScriptedModel(lambda context: (context[-1] + 1 + (context[-1] == 5)) % 7, 20)
    drafters.drafters = {key_of("ngram"): NgramDrafter(), key_of("draft_model", "d"): DraftModelDrafter(draft)}
    return Engine(target, drafters, limits=limits)


def check_sums(engine: Engine, states: list[RequestState]) -> None:
    """Every additive counter of the engine is the sum over its requests, and every request is in one of five places."""
    totals = engine.stats
    for name in SUMS:
        own = [getattr(state.stats, name) for state in states]
        if isinstance(own[0], dict):
            assert getattr(totals, name) == sum(map(Counter, own), Counter()), name
        elif isinstance(own[0], list):
            assert getattr(totals, name) == [sum(column) for column in itertools.zip_longest(*own, fillvalue=0)], name
        else:
            assert getattr(totals, name) == pytest.approx(sum(own), rel=1e-9, abs=1e-12), name
    assert totals.verify_s + totals.prompt_s == pytest.approx(totals.target_s + totals.rule_s)
    assert totals.longest_gap_s == max(state.stats.longest_gap_s for state in states)
    reasons = Counter(state.finish_reason for state in states)
    assert totals.num_submitted == len(states)
    assert totals.num_finished == reasons["stop"] + reasons["length"]
    assert (totals.num_failed, totals.num_aborted) == (reasons["error"], reasons["abort"])
    assert totals.num_waiting + totals.num_running == reasons[None]
    assert totals.num_aborted_tokens == sum(
        state.stats.num_emitted for state in states if state.finish_reason == "abort"
    )


def test_requests_add_up_to_the_engine() -> None:
    """Mixed drafters, prompts in pieces, requests that end, fail, are aborted while they run or wait, and a step that
    breaks.
    """
    engine = engine_of(SchedulerConfig(max_batch_size=4, max_prompt_tokens=5))
    prompts = [[8, 0, 1, 2, 3, 4], [9, 0, 1], [8, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3]]
    specs = [SpecConfig(), NGRAM, DRAFT, SpecConfig("ngram", num_draft=3)]
    states = [
        engine.submit(prompts[i % 4], SamplingParams(max_tokens=12 + i), specs[(i + i // 4) % 4]) for i in range(12)
    ]
    for step in itertools.count():
        if not engine.has_work:
            break
        engine.step()
        check_sums(engine, states)
        if step == 4:
            engine.abort(next(iter(engine.scheduler.running)))
            engine.abort(states[-1].request_id)
            engine.abort(states[-1].request_id)  # gone already
            check_sums(engine, states)
        if step == 8:
            for state in list(engine.scheduler.running.values())[:2]:
                engine.fail(state, RuntimeError("it broke"))
            check_sums(engine, states)
    assert states[-1].stats.num_emitted == 0
    # Alone and plainly: the cost of a plain step is known from its first one on, whatever `auto` chose before.
    states.append(engine.submit([1, 2, 3], SamplingParams(max_tokens=6), SpecConfig()))
    while engine.has_work:
        engine.step()
        check_sums(engine, states)
    assert {state.finish_reason for state in states} == {"length", "error", "abort"}
    totals = engine.stats
    assert min(totals.num_rejected, totals.num_accepted, totals.num_aborted_tokens, totals.num_drafts) > 0
    assert min(totals.wasted_s, totals.prompt_s, totals.plain_s, totals.draft_s) > 0
    assert totals.num_waiting == totals.num_running == 0
    assert totals.num_first_tokens <= totals.num_started < totals.num_submitted


@pytest.mark.parametrize("only_follows", [False, True])
def test_the_phases_are_the_step(monkeypatch: pytest.MonkeyPatch, only_follows: bool) -> None:
    """Nothing between the first and the last look at the clock is lost or counted twice."""
    monkeypatch.setattr(NgramDrafter, "only_follows", only_follows)
    ticks = itertools.count()
    monkeypatch.setattr("foretoken.engine.engine.time.perf_counter", lambda: float(next(ticks)))
    engine = engine_of()
    engine.submit([1, 2, 3, 4, 5, 6, 0, 1, 2], SamplingParams(max_tokens=12), NGRAM)
    spent = 0.0
    while engine.has_work:
        engine.step()
        spent += engine.clock.emitted - engine.clock.began
        assert engine.stats.step_s == spent
    assert engine.stats.num_accepted > 0
    # Two looks at the clock, and one more after the draft of a drafter that has a commit; one step of those is its own.
    assert engine.stats.commit_s == engine.stats.num_steps + (0 if only_follows else engine.stats.num_drafts)


# ---- one step by hand


def entry(number: int, spec: SpecConfig, pending: int = 1, decodes: bool = True) -> BatchEntry:
    request = Request(number, (0,) * 9, SamplingParams(), spec, 0)
    option = 0 if decodes and spec.drafter else None
    return BatchEntry(request, 10 if pending == 1 else 0, (0,) * pending, decodes, 5, option=option)


def charged(
    batch: Batch, draft: Draft, verdict: Verdict, steps: CostTable, spent_s: dict[object, float]
) -> list[RequestStats]:
    """The accounts after a step of 1 s scheduling, 3 s drafting, 20 s target, 4 s rules."""
    clock = StepClock(began=0.0, scheduled=1.0, proposed=3.0, forwarded=23.0, verified=27.0, taught_s=1.0)
    accounts, totals = [RequestStats() for _ in batch.entries], EngineStats()
    keys = {one.request.request_id: tuple(own_drafters(one.request.spec)) for one in batch.entries}
    charge(batch, draft, verdict, clock, spent_s, keys.__getitem__, steps, accounts, totals)
    for name in ("draft_s", "verify_s", "prompt_s", "wasted_s"):
        assert getattr(totals, name) == pytest.approx(sum(getattr(account, name) for account in accounts))
    assert totals.draft_s == pytest.approx(3.0)
    assert totals.verify_s + totals.prompt_s == pytest.approx(24.0)
    return accounts


def draft_of(lengths: list[int], drafters: list[str | None], num_probes: tuple[int, ...] = ()) -> Draft:
    offsets = tuple(itertools.accumulate(lengths, initial=0))
    parents = tuple(place - 1 for length in lengths for place in range(length))
    probes = None
    if num_probes:
        places = tuple(itertools.accumulate(num_probes, initial=0))
        probes = Probes(torch.zeros(places[-1], dtype=torch.int64), (-1,) * places[-1], places)
    return Draft(torch.zeros(offsets[-1], dtype=torch.int64), parents, offsets, tuple(drafters), probes=probes)


def verdict_of(*kept: int) -> Verdict:
    paths = tuple(tuple(range(count)) for count in kept)
    return Verdict(paths, tuple((0,) * count for count in kept), (0,) * len(kept), ("bonus",) * len(kept))


def test_a_drafter_that_nobody_of_the_step_has() -> None:
    """It showed draft tokens for a request that was preempted before the step ran: all pay for that."""
    batch = Batch((entry(0, DRAFT), entry(1, SpecConfig())))
    draft = draft_of([2, 0], ["draft_model", None])
    steps = CostTable(Curve(((14, 20.0), (18, 22.0))))
    accounts = charged(batch, draft, verdict_of(2, 0), steps, {drafter_key(DRAFT): 1.0, drafter_key(NGRAM): 0.5})
    assert [account.draft_s for account in accounts] == pytest.approx([2.0, 1.0])


def test_what_a_lookup_takes_beyond_showing_its_draft() -> None:
    """In rounds that repeat a budget nothing is shown, and the lookup itself counts."""
    option, key = DrafterOption(0, "lookups", shows=True), drafter_key(NGRAM)
    draft, batch = draft_of([2], ["ngram"]), Batch((entry(0, NGRAM),))
    for shown_s, expected_s in (({key: 0.25}, 0.5), ({}, 0.75)):
        drafters = SimpleNamespace(
            keys=lambda _: (key,), options=lambda _: (option,), spent_s={key: 0.75}, shown_s=shown_s, num_read_tokens={}
        )
        outcome = outcome_of(batch, draft, verdict_of(1), drafters, 1.0)
        assert outcome.draft_s == {"lookups": expected_s}
        assert outcome.num_read_tokens == {}


def test_the_control_is_told_which_drafters_ran() -> None:
    """Neither draft token: one found nothing worth it, the other had no room."""
    drafters = SimpleNamespace(
        keys=lambda _: ("k",), options=lambda _: (DrafterOption(0, "d"),), spent_s={}, shown_s={}, num_read_tokens={}
    )
    batch = Batch((entry(0, DRAFT), entry(1, DRAFT)))
    outcome = outcome_of(batch, draft_of([0, 0], ["draft_model", None]), verdict_of(0, 0), drafters, 1.0)
    assert [(round_.chances, round_.has_run) for round_ in outcome.rounds] == [([], True), ([], False)]


def test_who_pays_for_a_step() -> None:
    """Two requests of one drafter, one of another that found nothing, one plain, and a piece of a prompt."""
    batch = Batch(
        (
            entry(0, DRAFT),
            entry(1, DRAFT),
            entry(2, NGRAM),
            entry(3, SpecConfig()),
            entry(4, NGRAM, pending=6, decodes=False),
        )
    )
    draft = draft_of([4, 1, 0, 0], ["draft_model", "draft_model", None, None], (0, 0, 0, 3))
    steps = CostTable(Curve(((14, 20.0), (18, 22.0))))  # half a second a row: less than the rows' share
    accounts = charged(batch, draft, verdict_of(1, 1, 0, 0), steps, {drafter_key(DRAFT): 2.0, drafter_key(NGRAM): 0.5})
    shared = 0.5 / 5  # of 3 s that drafting took, what no drafter took
    assert [account.draft_s for account in accounts] == pytest.approx(
        [shared + 1.6, shared + 0.4, shared + 0.5, shared, shared]
    )
    row = 24.0 / (5 + 2 + 1 + 4 + 6)
    assert [account.verify_s for account in accounts] == pytest.approx([5 * row, 2 * row, row, 4 * row, 0.0])
    assert [account.prompt_s for account in accounts] == pytest.approx([0.0] * 4 + [6 * row])
    assert [account.wasted_s for account in accounts] == pytest.approx([3 * 0.5 + 1.6 * 3 / 4, 0, 0, 0, 0])
    assert [account.num_steps for account in accounts] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(("slope", "wasted"), [(0.0, 0.0), (0.25, 1.0), (100.0, 4 * 24.0 / 5)])
def test_waste_is_what_the_rows_added_and_never_more_than_their_share(slope: float, wasted: float) -> None:
    """A table without slope: draft tokens came for nothing."""
    steps = CostTable(Curve(tuple((rows, 20.0 + slope * rows) for rows in (1, 5))))
    (account,) = charged(Batch((entry(0, NGRAM),)), draft_of([4], [GRAMMAR]), verdict_of(0), steps, {})
    assert account.wasted_s == pytest.approx(wasted)


def test_a_grammars_draft_tokens_cost_no_drafting() -> None:
    batch, draft = Batch((entry(0, NGRAM), entry(1, NGRAM))), draft_of([4, 1], [GRAMMAR, "ngram"])
    accounts = charged(batch, draft, verdict_of(2, 0), CostTable(), {drafter_key(NGRAM): 3.0})
    assert [account.draft_s for account in accounts] == [0.0, 3.0]
    assert [account.wasted_s for account in accounts] == [0.0, 3.0]  # nothing is known of the forward yet


def test_the_last_token_of_a_prompt_is_prompt_also_alone() -> None:
    batch = Batch((replace(entry(0, NGRAM), start=9), replace(entry(1, NGRAM), start=8)))
    accounts = charged(batch, draft_of([0, 0], [None, None]), verdict_of(0, 0), CostTable(), {})
    assert [(account.verify_s, account.prompt_s) for account in accounts] == [(12.0, 0.0), (0.0, 12.0)]


def test_the_gain_over_plain_decoding() -> None:
    """Two requests, a step of 12 s; without drafting 10 s would have brought a token each."""
    steps, clock = CostTable(), StepClock(began=0.0, scheduled=1.0, proposed=2.0, forwarded=12.0, verified=13.0)
    batch = Batch((entry(0, NGRAM), entry(1, SpecConfig())))
    steps.observe(3, 8.0)
    assert gain(batch, clock, steps) is None  # what fewer rows take was never measured
    steps.observe(2, 10.0)
    found = gain(batch, clock, steps)
    assert found is not None
    assert found == pytest.approx((5.0, 6.0), rel=0.01)
    assert gain(Batch((*batch.entries, entry(2, NGRAM, pending=3, decodes=False))), clock, steps) is None
    counters = Counters()
    assert counters.estimated_speedup is None
    for num_tokens in (3, 1):
        counters.count_gain(num_tokens * 5.0, 6.0)
    assert counters.estimated_speedup == pytest.approx(20.0 / 12.0)


# ---- what counts as what


def test_draft_tokens_are_accepted_rejected_or_cut() -> None:
    """A tree whose path of three was emitted up to its second node, because the answer ended there."""
    counters = Counters()
    counters.count_round(
        RoundCounts(
            [1, 2, 2, 3],
            ["a", "a", "b", "b"],
            (0, 2, 3),
            num_emitted=2,
            num_probed=7,
            inner=(5, 4),
            tie_gaps=[0.5, 0.25],
        )
    )
    assert (
        counters.num_drafts,
        counters.num_drafted,
        counters.num_accepted,
        counters.num_cut,
        counters.num_rejected,
    ) == (1, 4, 2, 1, 1)
    assert counters.accepted_per_position == ((1, 1), (2, 1), (1, 0))
    assert (counters.drafted_by, counters.accepted_by) == ({"a": 2, "b": 2}, {"a": 1, "b": 1})
    assert (counters.num_probed, counters.num_inner_drafted, counters.num_inner_accepted) == (7, 5, 4)
    assert (counters.num_near_ties, counters.near_tie_gap) == (2, 0.5)
    counters.count_round(RoundCounts([], [], (), num_emitted=1))
    assert (counters.num_drafts, counters.num_drafted, counters.num_emitted) == (1, 4, 3)


def test_draft_tokens_behind_the_end_are_not_wasted() -> None:
    """Every draft token is right, and the end token comes in the middle of a draft."""
    said = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    target = ScriptedModel(recite(said), 10)
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("draft_model", "d")] = DraftModelDrafter(ScriptedModel(recite(said), 10))
    engine = Engine(target, drafters, eos_token_ids=[4])
    state = engine.submit([0], SamplingParams(max_tokens=9), SpecConfig("draft_model", "d", num_draft=5))
    while engine.has_work:
        engine.step()
    assert (state.output_ids, state.finish_reason) == ([1, 2, 3, 4], "stop")
    for stats in (state.stats, engine.stats):
        assert (stats.num_drafted, stats.num_accepted, stats.num_cut, stats.num_rejected) == (5, 3, 2, 0)
        assert stats.wasted_s == 0.0 < stats.draft_s


def test_waiting_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place in the batch: the second request waits for the whole of the first. The clock goes on by one at every
    look.
    """
    ticks = itertools.count()
    monkeypatch.setattr("foretoken.engine.engine.time.perf_counter", lambda: float(next(ticks)))
    engine = engine_of(SchedulerConfig(max_batch_size=1))
    first, second = (engine.submit([1, 2], SamplingParams(max_tokens=4), SpecConfig()) for _ in range(2))
    first.arrived_s = second.arrived_s = -1.0
    assert (engine.stats.num_waiting, engine.stats.num_running) == (2, 0)
    engine.step()
    assert (engine.stats.num_waiting, engine.stats.num_running) == (1, 1)
    while engine.has_work:
        engine.step()
    assert (
        0
        < first.stats.queued_s
        < first.stats.ttft_s
        < first.stats.total_s
        <= second.stats.queued_s
        < second.stats.ttft_s
    )
    for stats in (first.stats, second.stats):
        assert stats.inter_token_s == stats.longest_gap_s == (stats.total_s - stats.ttft_s) / 3
    assert engine.stats.inter_token_s == first.stats.inter_token_s
    assert engine.stats.num_first_tokens == engine.stats.num_started == 2


def test_cached_prompt_tokens(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", cache_tokens=1024) as llm:
        before, after = (llm.generate([token_ids(70)], SamplingParams(max_tokens=2))[0].stats for _ in range(2))
        assert (before.num_prompt_tokens, before.num_cached_tokens, after.num_cached_tokens) == (70, 0, 64)
        assert (llm.stats.num_prompt_tokens, llm.stats.num_cached_tokens) == (140, 64)
        assert llm.stats.prefix is not None
        assert llm.stats.prefix.num_found_tokens == 64


# ---- as values


def test_a_snapshot_stays_as_it_is(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", cache_tokens=512) as llm:
        seen = []
        for _ in range(2):
            llm.generate(
                [token_ids(6) * 3],
                SamplingParams(max_tokens=12, ignore_eos=True),
                SpecConfig("draft_model", str(pair.draft), num_draft=3),
            )
            seen.append((llm.stats, json.dumps(llm.stats.as_dict())))
        assert json.dumps(seen[0][0].as_dict()) == seen[0][1] != seen[1][1]
        assert json.loads(seen[1][1])["prefix"]["num_looked_up_tokens"] == 36


def test_every_counter_is_documented() -> None:
    """And the other way round: the table names nothing that is not there."""
    text = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text()
    section = text.split("## Counters")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {of.strip(): set() for _, _, _, of, _, _ in rows}
    for _, names, _, of, _, _ in rows:
        named[of.strip()] |= set(re.findall(r"`(\w+)`", names))
    request, engine = set(RequestStats().as_dict()), set(EngineStats().as_dict())
    assert named["both"] == request & engine
    assert named["request"] == request - engine
    assert named["engine"] == engine - request
    json.dumps([RequestStats().as_dict(), EngineStats().as_dict()])
