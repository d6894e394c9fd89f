"""Built-in traces against their rates, and the load they put on whoever serves them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.plan.profile import Curve, DrafterCost, Profile
from foretoken.simulate.inputs import Limits, SimSetting
from foretoken.simulate.loads import SHAPES, Server, built_in, sample
from foretoken.simulate.metrics import outcome
from foretoken.simulate.simulate import simulate
from tests.helpers.usual import some_of

UNIT = Profile(
    {},
    {},
    {},
    "",
    "",
    rows=Curve(((1, 1.0),)),
    chunk=Curve(((1, 1.0),)),
    drafters={"ngram": DrafterCost(Curve(((1, 0.5),)))},
)
LIMITS = Limits(max_context_tokens=2048)
PLAIN = Server(UNIT, LIMITS)


@pytest.mark.parametrize("name", some_of(SHAPES, {"steady", "bursts"}))
def test_built_in_traces_follow_their_rates(name: str) -> None:
    """As many requests as the phases say, at a rate that the machine's capacity gives; a machine twice as slow gets
    them twice as slowly.
    """
    jobs = built_in(name, PLAIN, 0, 4000.0)
    shape = SHAPES[name]
    expected = PLAIN.capacity(jobs) * 4000 * sum(p.share * (p.begin + p.end) / 2 for p in shape.phases)
    assert len(jobs) == pytest.approx(expected, rel=0.15)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    assert 0 < jobs[0].arrival_s <= jobs[-1].arrival_s < 4000
    assert {job.acceptance for job in jobs} == set(shape.slices)
    assert all(shape.prompts.low <= job.prompt_tokens <= shape.prompts.high for job in jobs)
    assert jobs == built_in(name, PLAIN, 0, 4000.0) != built_in(name, PLAIN, 1, 4000.0)
    slow = replace(UNIT, rows=Curve(((1, 2.0),)), chunk=Curve(((1, 2.0),)))
    slower = built_in(name, replace(PLAIN, profile=slow), 0, 8000.0)
    assert [job.arrival_s for job in slower] == pytest.approx([2 * job.arrival_s for job in jobs])
    assert {job.acceptance for job in sample(name, 40, 0)} <= set(shape.slices)


def test_each_setting_has_its_own_capacity_and_the_slowest_counts() -> None:
    """Draft tokens that never stand and take half a step make the trace two thirds as fast; those that always stand,
    and cost nothing, faster.
    """
    lost, won = ({"ngram": dict.fromkeys(SHAPES["bursts"].slices, (chance,))} for chance in (0.0, 1.0))
    jobs = sample("steady", 200, 0)
    plain, losing = PLAIN.capacity(jobs), Server(UNIT, LIMITS, (SimSetting(("ngram",), 1),), lost).capacity(jobs)
    assert losing == pytest.approx(plain / 1.5, rel=0.05)
    assert Server(UNIT, LIMITS, (SimSetting(("ngram",), 4),), won).capacity(jobs) > 2 * plain
    assert Server(UNIT, LIMITS, (SimSetting(("ngram",), 1), SimSetting()), lost).capacity(jobs) == losing
    both = Server(UNIT, LIMITS, (SimSetting(), SimSetting(("ngram",), 1)), lost)
    assert [job.arrival_s for job in built_in("ramp", both, 0, 90.0)] != [
        job.arrival_s for job in built_in("ramp", PLAIN, 0, 90.0)
    ]


@pytest.mark.parametrize("name", some_of(SHAPES, {"overload", "ramp"}))
def test_only_overload_overloads(name: str) -> None:
    """With a batch of 16 others have at most about as many requests there on average, overload several times as
    many.
    """
    jobs = built_in(name, PLAIN, 0, 4000.0)
    there = outcome(simulate(UNIT, jobs, SimSetting(), LIMITS)).mean_in_system
    assert (there > 48) if name == "overload" else (3 < there < 18)


def test_a_trace_fits_the_machine() -> None:
    ramp = built_in("ramp", PLAIN, 0, 4000.0)
    assert sum(job.arrival_s > 2000 for job in ramp) > 0.6 * len(ramp)
    overload = built_in("overload", PLAIN, 0, 4000.0)
    assert sum(job.arrival_s < 2000 for job in overload) > 0.85 * len(overload)
    fast = replace(UNIT, rows=Curve(((1, 0.001),)), chunk=Curve(((1, 0.001),)))
    assert 11 < built_in("steady", replace(PLAIN, profile=fast), 0)[-1].arrival_s < 12
    slow = replace(UNIT, rows=Curve(((1, 0.1),)), chunk=Curve(((1, 0.1),)))
    assert 30 < built_in("steady", replace(PLAIN, profile=slow), 0)[-1].arrival_s < 40
    assert len(built_in("steady", PLAIN, 0, 1e-6)) == 1
