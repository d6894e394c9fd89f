"""Distributions of queues: work is conserved, Little's law holds, more acceptance is never slower."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from foretoken.errors import CapacityError, ConfigError, InputError
from foretoken.simulate.inputs import Job, Lengths, Limits, SimSetting, parse_setting, poisson
from foretoken.simulate.metrics import outcome
from foretoken.simulate.simulate import Fleet, simulate
from tests.simulate.test_simulate import CURVED, UNIT, mixed_jobs

SETTINGS = [SimSetting(), SimSetting(("ngram",), 4), SimSetting(("ngram",), None)]
FLEETS = [Fleet(), Fleet(3), Fleet(3, "least_loaded")]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("fleet", FLEETS, ids=["one", "turns", "least"])
def test_work_is_conserved_and_littles_law_holds(setting: SimSetting, fleet: Fleet) -> None:
    """Every token comes out once; no engine idles while it has a request; requests there = rate x time there."""
    jobs, steps = mixed_jobs(60, 5, rate=1.0), []
    ended = simulate(CURVED, jobs, setting, Limits(max_batch_size=4), fleet=fleet, watch=steps.append)
    assert [c.num_emitted for c in ended.requests] == [job.output_tokens for job in jobs]
    assert sum(count for step in steps for _, count in step.emitted) == sum(job.output_tokens for job in jobs)
    assert all(c.finish_s >= c.first_s > c.job.arrival_s for c in ended.requests)
    found = outcome(ended)
    rate, mean_s = len(jobs) / found.makespan_s, sum(c.finish_s - c.job.arrival_s for c in ended.requests) / len(jobs)
    assert found.mean_in_system == pytest.approx(rate * mean_s)
    for engine in ended.engines:
        own = [step for step in steps if step.replica == engine.number]
        mine = {index for step in own for index, _ in step.emitted}
        for before, after in itertools.pairwise(own):
            end = before.start_s + before.seconds
            gap = after.start_s - end
            assert gap >= -1e-9
            assert gap < 1e-9 or not [
                c
                for c in ended.requests
                if c.request_id in mine and c.job.arrival_s < end - 1e-9 and c.finish_s > end + 1e-9
            ]
    assert 0 < found.utilisation <= 1
    assert found.utilisation * found.makespan_s * fleet.replicas == pytest.approx(sum(step.seconds for step in steps))


@pytest.mark.parametrize("num_draft", [1, 3, 8])
def test_more_acceptance_is_never_slower(num_draft: int) -> None:
    """For every single request, not only on average: the draws stay, the bar falls. Whole seconds: no arrival may fall
    between two steps.
    """
    jobs = [replace(job, arrival_s=float(int(job.arrival_s))) for job in mixed_jobs(30, 8)]
    finishes = []
    for chance in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        ended = simulate(
            UNIT,
            [replace(job, acceptance=(chance,)) for job in jobs],
            SimSetting(("ngram",), num_draft),
            Limits(max_batch_size=4),
        )
        finishes.append([c.finish_s for c in ended.requests])
    for worse, better in itertools.pairwise(finishes):
        assert all(b <= a for a, b in zip(worse, better, strict=True))
    assert sum(finishes[-1]) < sum(finishes[0])


def test_same_seed_same_result() -> None:
    jobs = poisson(0.5, 40, Lengths(4, 30), Lengths(5, 20), (0.6,), seed=1)
    first, again, other = (
        outcome(simulate(CURVED, jobs, SimSetting(("ngram",), None), Limits(), seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_policy_follows_acceptance_and_load() -> None:
    """Where draft tokens always stand it comes close to the best fixed number, where none does to plain decoding, under
    load it holds back.
    """

    def rate(setting: SimSetting, chance: float, batch: int) -> float:
        jobs = [Job(0.0, 8, 300, (chance,)) for _ in range(batch)]
        return outcome(simulate(CURVED, jobs, setting, Limits(max_batch_size=batch))).tokens_per_s

    auto, plain = SimSetting(("ngram",), None), SimSetting()
    assert rate(auto, 1.0, 1) > 0.85 * max(rate(SimSetting(("ngram",), n), 1.0, 1) for n in (4, 8, 16, 24))
    assert rate(auto, 0.0, 1) > 0.95 * rate(plain, 0.0, 1) > rate(SimSetting(("ngram",), 8), 0.0, 1)
    assert rate(auto, 0.1, 16) > 0.95 * rate(plain, 0.1, 16) > rate(SimSetting(("ngram",), 4), 0.1, 16)


def test_a_fleet_shares_the_work() -> None:
    """Two requests on two engines run as if alone; the least loaded engine is the one that has finished."""
    jobs = [Job(0.0, 5, 10), Job(0.0, 5, 2), Job(4.0, 5, 2)]
    turns = simulate(UNIT, jobs, SimSetting(), Limits(max_batch_size=1), fleet=Fleet(2))
    least = simulate(UNIT, jobs, SimSetting(), Limits(max_batch_size=1), fleet=Fleet(2, "least_loaded"))
    assert [c.finish_s for c in turns.requests] == [10.0, 2.0, 12.0]
    assert [c.finish_s for c in least.requests] == [10.0, 2.0, 6.0]
    assert outcome(least, price_per_hour=36.0).price_per_million_tokens == pytest.approx(
        36.0 * 2 * 10 / 3600 / 14 * 1e6
    )


def test_figures_by_hand() -> None:
    ended = simulate(UNIT, [Job(1.0, 5, 4, (1.0,)), Job(2.0, 5, 1, (1.0,))], SimSetting(("ngram",), 1), Limits())
    # Steps at 1 (prompt), 2 (two tokens; the other's prompt and only token), 3 (the last).
    found = outcome(ended)
    assert [(c.first_s, c.finish_s) for c in ended.requests] == [(2.0, 4.0), (3.0, 3.0)]
    assert (found.num_tokens, found.num_steps, found.makespan_s, found.tokens_per_s) == (
        5,
        3,
        3.0,
        pytest.approx(5 / 3),
    )
    assert (found.ttft_s_p50, found.latency_s_p50, found.latency_s_p95) == pytest.approx((1.0, 2.0, 2.9))
    assert (found.inter_token_s_p50, found.utilisation, found.num_drafted, found.num_accepted) == pytest.approx(
        (2 / 3, 1.0, 1, 1)
    )
    assert found.price_per_million_tokens is None


def test_what_cannot_run_is_refused() -> None:
    cases = [
        (
            ConfigError,
            "the profile has no cost of eagle; it knows ngram",
            lambda: simulate(UNIT, [Job(0, 1, 1)], SimSetting(("eagle",), 3), Limits()),
        ),
        (
            InputError,
            "a prompt at most 9",
            lambda: simulate(UNIT, [Job(0, 10, 1)], SimSetting(), Limits(max_context_tokens=10)),
        ),
        (
            CapacityError,
            "may need 64 tokens",
            lambda: simulate(UNIT, [Job(0, 30, 3)], SimSetting(), Limits(cache_tokens=63)),
        ),
        (
            InputError,
            "acceptance='code': no chances",
            lambda: simulate(UNIT, [Job(0, 1, 1, "code")], SimSetting(("ngram",), 1), Limits()),
        ),
        (ConfigError, "max_batch_size=0", lambda: Limits(max_batch_size=0)),
        (ConfigError, "replicas=0", lambda: Fleet(0)),
        (ConfigError, "settings='ngram'", lambda: parse_setting("ngram")),
        (ConfigError, "settings='ngram-x'", lambda: parse_setting("ngram-x")),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    assert (
        simulate(UNIT, [Job(0, 1, 2, "code")], SimSetting(), Limits()).requests[0].num_emitted == 2
    )  # nobody drafts: no chance is asked for
    assert [parse_setting(text) for text in ("plain", "ngram-5", "draft_model-auto")] == [
        SimSetting(),
        SimSetting(("ngram",), 5),
        SimSetting(("draft_model",), None),
    ]
    assert [SimSetting(("ngram",), 5).name, SimSetting(("draft_model",), None).name, SimSetting().name] == [
        "ngram-5",
        "draft_model-auto",
        "plain",
    ]
