"""A replica of the fleet against the simulation of its requests, and days in which replicas fail, come and go."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.control import autoscaling
from foretoken.control.autoscaling import stepped_replicas, wanted_replicas
from foretoken.plan.profile import Profile, profile_from_mapping
from foretoken.scale.options import RayOptions
from foretoken.simulate.fleet import day as days
from foretoken.simulate.fleet import plan
from foretoken.simulate.fleet.day import Aim, Autoscaler, FleetDay, Hour, p95, together
from foretoken.simulate.fleet.options import FleetOptions, Traffic
from foretoken.simulate.fleet.plan import FleetPlanner
from foretoken.simulate.fleet.speed import ReplicaSpeed, RequestMix, replica_speed
from foretoken.simulate.inputs import Lengths, Limits, parse_setting, poisson
from foretoken.simulate.metrics import outcome
from foretoken.simulate.simulate import simulate

_PROFILES = Path(__file__).parents[3] / "studies/worlds/data"
_MIX = RequestMix(Lengths(32, 96), Lengths(32, 96), {"": (0.7,)})
_STEADY = FleetOptions(night_share=1.0, mtbf_h=0.0, routing="random", min_replicas=1)


def measured(name: str) -> Profile:
    """A profile that was measured on a CPU."""
    return profile_from_mapping(json.loads((_PROFILES / f"profile-{name}.json").read_text()))


def speed_of(setting: str = "plain", name: str = "2ms") -> ReplicaSpeed:
    return replica_speed(measured(name), parse_setting(setting), _MIX, Limits())


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute at a time."""
    monkeypatch.setattr(days, "TICK_S", 60.0)


@pytest.mark.parametrize("setting", ["plain", "draft_model-4"])
def test_one_replica_is_as_its_requests_one_by_one(setting: str) -> None:
    """Two programs that share the curves and nothing else; what is left between them is chance."""
    speed = speed_of(setting)
    rate = 0.6 * max(speed.finish_rates)
    options = replace(_STEADY, peak_rate=rate)
    day = together(FleetDay(speed, options, None, 1, 0).run())
    first_s, token_s = p95(speed, day, options)
    jobs = poisson(rate, 800, _MIX.prompts, _MIX.outputs, (0.7,), seed=2)
    found = outcome(simulate(measured("2ms"), jobs, parse_setting(setting), Limits()))
    mean = sum(place * one for place, one in enumerate(day.found)) / day.arrivals
    assert mean == pytest.approx(found.mean_in_system, rel=0.12)
    assert day.busy_s / day.live_s == pytest.approx(found.utilisation, abs=0.03)
    assert token_s == pytest.approx(found.inter_token_s_p95, rel=0.15)
    assert first_s == pytest.approx(found.ttft_s_p95, rel=0.25)


def test_the_best_number_of_draft_tokens_is_that_of_a_search() -> None:
    """`auto` is at each number of requests as fast as the best fixed number of draft tokens."""
    fixed = [speed_of(name) for name in ("plain", *(f"draft_model-{count}" for count in range(1, 25)))]
    auto = speed_of("draft_model-auto")
    for place, rate in enumerate(auto.finish_rates):
        assert rate == pytest.approx(max(one.finish_rates[place] for one in fixed), rel=0.02)
    assert auto.finish_rates[0] > 1.05 * fixed[0].finish_rates[0]


def test_a_day_adds_up_while_replicas_fail_and_a_zone_is_lost() -> None:
    speed = speed_of(name="1b")
    options = FleetOptions(peak_rate=8 * max(speed.finish_rates), mtbf_h=24.0, outage_share=0.5, start_s=600.0)
    aim = Aim(round(speed.queued_tokens(4)))
    hours = FleetDay(speed, options, aim, 10, 3).run()
    assert hours == FleetDay(speed, options, aim, 10, 3).run()
    day, peak = together(hours), int(options.traffic.peak_s // 3600)
    came = sum(options.traffic.rate(tick * 60.0) * 60 for tick in range(1440))
    assert day.arrivals == pytest.approx(came + day.interrupted, rel=1e-4)
    assert sum(day.found) == pytest.approx(day.arrivals)
    assert day.refused <= day.arrivals
    assert day.paid_s >= day.live_s >= options.min_replicas * day.seconds
    assert hours[peak].interrupted > 5 * day.interrupted / 24
    fixed = FleetDay(speed, options, None, 10, 3).run()
    assert p95(speed, fixed[peak], options)[0] > 2 * p95(speed, fixed[peak - 2], options)[0]
    assert max(hour.replicas for hour in hours) > 2 * min(hour.replicas for hour in hours), "the number follows traffic"
    quiet = replace(options, mtbf_h=0.0, outage_share=0.0)
    assert together(FleetDay(speed, quiet, aim, 10, 3).run()).interrupted == 0


def test_too_many_requests_are_refused_and_counted() -> None:
    """At twice what it can do a replica is full, and refuses a half."""
    speed = speed_of()
    options = replace(_STEADY, peak_rate=2 * max(speed.finish_rates), max_waiting=20, max_replicas=1)
    day = together(FleetDay(speed, options, None, 1, 0).run())
    assert day.refused / day.arrivals == pytest.approx(0.5, abs=0.02)
    assert p95(speed, day, options) == (float("inf"), float("inf"))


def test_the_autoscaler_waits_as_long_as_it_is_told() -> None:
    options = FleetOptions(scale_up_s=100.0, scale_down_s=300.0, max_replicas=7)
    scaler = Autoscaler(100, options, 2)
    assert wanted_replicas(950.0, 950.0, 0.0, 100, 100) == 9.5
    assert [scaler.decide(950.0, 2, 60.0) for _ in range(3)] == [2, 7, 7], "ten are wanted, seven allowed"
    assert [scaler.decide(310.0, 7, 60.0) for _ in range(6)] == [7, 7, 7, 7, 7, 6], "a step of four"


def test_steady_traffic_keeps_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the delays of `serve --ray`, at an aim near a full batch; with whole steps downwards
    the number of replicas swings, at more than half as much again for each token.
    """
    monkeypatch.setattr(days, "TICK_S", 30.0)
    speed, ray = speed_of("draft_model-auto", "1b"), RayOptions()
    delays = {"scale_up_s": ray.scale_up_s, "scale_down_s": ray.scale_down_s}
    options = replace(_STEADY, peak_rate=10 * max(speed.finish_rates), **delays)

    def day(aim: Aim) -> tuple[int, float]:
        """Most replicas at once, and those that are paid, on average."""
        whole = together(FleetDay(speed, options, aim, 12, 0).run())
        return whole.max_replicas, whole.paid_s / whole.seconds

    tokens = Aim(round(0.8 * speed.queued_tokens(16)))
    for aim in (Aim(), tokens):
        most, paid = day(aim)
        assert most <= paid + 2
    monkeypatch.setattr(autoscaling, "DOWN_SHARE", 1.0)
    assert day(tokens) > (2 * most, 1.5 * paid)


@pytest.mark.parametrize(("name", "outputs", "replicas"), [("1b", 800, 8), ("1b", 12, 3), ("2ms", 100, 8)])
def test_without_an_aim_nobody_waits_for_a_replica_to_come(name: str, outputs: int, replicas: int) -> None:
    """On a machine of 25 and one of 1400 tokens per second, with short and long answers: first tokens come as fast as
    beside a full batch, and replicas are paid for at most 1.4 times what the traffic needs. An aim of 16,384 tokens
    has people wait.
    """
    mix = RequestMix(Lengths(32, 96), Lengths(outputs // 2, outputs * 3 // 2), {"": (0.7,)})
    speed = replica_speed(measured(name), parse_setting("plain"), mix, Limits())
    options = FleetOptions(peak_rate=replicas * max(speed.finish_rates), mtbf_h=0.0)
    planner = FleetPlanner(options, 1.0)
    default, before = (planner.day(speed, aim, None).day for aim in (Aim(), Aim(16_384)))
    full = Hour()
    full.count([0.0] * 15 + [1.0], 1.0)
    assert p95(speed, default, options)[0] <= 1.05 * p95(speed, full, options)[0]
    needed = sum(options.traffic.rates) / len(options.traffic.rates) / max(speed.finish_rates)
    assert default.paid_s / default.seconds <= 1.4 * needed
    assert p95(speed, before, options)[0] > 10 * p95(speed, default, options)[0]


@pytest.mark.parametrize(
    ("wanted", "live", "expected"),
    [(9.2, 4, 10), (4.0, 4, 4), (3.9, 4, 4), (2.9, 4, 3), (0.0, 10, 8), (0.0, 2, 1), (0.0, 1, 0)],
)
def test_steps_downwards_are_a_fifth_of_the_way(wanted: float, live: int, expected: int) -> None:
    assert stepped_replicas(wanted, live) == expected


def test_traffic_is_what_was_asked_for() -> None:
    traffic = FleetOptions(peak_rate=100.0, night_share=0.2).traffic
    assert (max(traffic.rates), min(traffic.rates)) == pytest.approx((100.0, 20.0))
    assert traffic.rate(traffic.peak_s) == 100.0
    assert traffic.rate(-3600.0) == traffic.rate(23 * 3600.0)
    assert Traffic((0.0, 10.0)).rate(3 * 6 * 3600.0) == 5.0


def test_the_plan_is_the_cheapest_that_keeps_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica fewer breaks it, and by night the autoscaler has fewer."""
    monkeypatch.setattr(plan, "_AIMS", (0.1, 0.2, 0.3))
    speed = speed_of(name="1b")
    options = FleetOptions(peak_rate=6 * max(speed.finish_rates), mtbf_h=0.0, p95_token_ms=1500.0)
    planner = FleetPlanner(options, 2.0)
    said: list[str] = []
    fixed = planner.fixed("plain", speed, said.append)
    assert fixed.meets
    assert not planner.day(speed, None, fixed.replicas_max - 1).meets
    assert fixed.price_per_million_tokens == pytest.approx(fixed.replicas_max * 24 * 2.0 / fixed.num_tokens * 1e6)
    scaled = planner.autoscaled("plain", speed, said.append)
    assert scaled.meets
    assert scaled.replicas_mean < fixed.replicas_mean
    assert len(scaled.hours) == 24
    assert len(said) > 6


def test_figures_of_hours_add_up() -> None:
    first, second = Hour(seconds=1.0, live_s=2.0), Hour(seconds=1.0, live_s=4.0)
    first.count([0.5, 0.5], 10.0)
    second.count([1.0], 30.0)
    both = together([first, second])
    assert (both.found, both.arrivals, both.replicas) == ([35.0, 5.0], 40.0, 3.0)
