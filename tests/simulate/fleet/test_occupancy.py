"""Numbers of requests against formulas of queues, a matrix exponential, and two-choice routing event by event."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from foretoken.plan.profile import Curve, Profile
from foretoken.simulate.fleet.occupancy import Occupancy
from foretoken.simulate.fleet.speed import ReplicaSpeed, RequestMix, replica_speed
from foretoken.simulate.inputs import Lengths, Limits, SimSetting


def speed_of(step_s: Curve, batch: int) -> ReplicaSpeed:
    """A replica that reads prompts for nothing; one-token prompts and answers of 101 tokens."""
    profile = Profile({}, {}, {}, "", "", rows=step_s)
    mix = RequestMix(Lengths(1, 1), Lengths(101, 101), {})
    made = replica_speed(profile, SimSetting(), mix, Limits(max_batch_size=batch))
    free = replace(made, prompt_s=(0.0,) * batch)
    finish = tuple(running / (100 * one) for running, one in zip(range(1, batch + 1), made.step_s, strict=True))
    return replace(free, finish_rates=finish)


def stationary(speed: ReplicaSpeed, rate: float) -> list[float]:
    """Shares of arrivals by what they find at one replica, after a long time at a steady rate."""
    occupancy, most = Occupancy([1.0], 400, "random"), range(401)
    rates = [speed.finish_rate(present) for present in most]
    for _ in range(300):
        occupancy.advance(rate, rates, 50.0)
    return occupancy.found()


def test_steps_of_one_length_are_erlangs_queue() -> None:
    """Each of c requests that run ends at the same rate, the others wait: M/M/c (Erlang, 1917)."""
    servers, step_s, load = 4, 0.01, 3.2
    speed = speed_of(Curve(((1, step_s),)), servers)
    found = stationary(speed, load / (100 * step_s))
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    waits = last / (sum(terms) + last)
    assert sum(found[servers:]) == pytest.approx(waits, rel=1e-3)
    mean = sum(k * share for k, share in enumerate(found))
    assert mean == pytest.approx(load + waits * load / (servers - load), rel=1e-3)
    limit_s = 0.5  # waiting is exponential with what the servers have left; then a step begins
    tail = waits * math.exp(-(servers - load) / (100 * step_s) * limit_s)
    assert speed.first_tail(found, limit_s) == pytest.approx(tail, rel=0.02)


def test_steps_as_long_as_their_rows_are_processor_sharing() -> None:
    """M/G/1 processor sharing: a geometric number of requests, whatever the lengths (Kleinrock, 1967)."""
    speed = speed_of(Curve(((1, 0.01), (2, 0.02))), 400)
    found = stationary(speed, 0.7)
    assert found[:20] == pytest.approx([0.3 * 0.7**k for k in range(20)], rel=1e-3)


@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_the_way_to_there_is_the_matrix_exponential(seconds: float) -> None:
    most, rate, died = 12, 2.0, [min(n, 3) * 1.0 for n in range(13)]
    generator = torch.zeros(most + 1, most + 1, dtype=torch.float64)
    for n in range(most + 1):
        if n < most:
            generator[n, n + 1] = rate
        if n:
            generator[n, n - 1] = died[n]
        generator[n, n] = -generator[n].sum()
    expected = torch.matrix_exp(generator * seconds)[0].tolist()
    occupancy = Occupancy([1.0], most, "random")
    for _ in range(2000):
        occupancy.advance(rate, died, seconds / 2000)
    shares = occupancy.shares + [0.0] * (most + 1 - len(occupancy.shares))
    assert shares == pytest.approx(expected, abs=2e-3)


def test_two_choices_against_forty_queues_event_by_event() -> None:
    rng, queues, load = random.Random(5), [0] * 40, 0.8
    events: list[tuple[float, int, int]] = []
    serial, area, now, begin = itertools.count(), 0.0, 0.0, 100.0
    total, next_s = 0, 0.0
    while now < 2000:
        time_s = min(next_s, events[0][0] if events else math.inf)
        area += total * (time_s - now) * (now > begin)
        now = time_s
        if now == next_s:
            next_s = now + rng.expovariate(load * len(queues))
            place = min(rng.sample(range(len(queues)), 2), key=queues.__getitem__)
            queues[place] += 1
            total += 1
            if queues[place] == 1:
                heapq.heappush(events, (now + rng.expovariate(1.0), next(serial), place))
        else:
            _, _, place = heapq.heappop(events)
            queues[place] -= 1
            total -= 1
            if queues[place]:
                heapq.heappush(events, (now + rng.expovariate(1.0), next(serial), place))
    occupancy = Occupancy([1.0], 60, "two")
    for _ in range(200):
        occupancy.advance(load, [0.0] + [1.0] * 60, 2.0)
    assert occupancy.mean == pytest.approx(area / (now - begin) / len(queues), rel=0.05)
    assert occupancy.mean < load / (1 - load) * 0.7, "no better than one queue each"
