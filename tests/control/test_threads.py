"""Threads chosen from the times of steps, on a simulated machine whose neighbours come and go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from foretoken.control.threads import Threading, ThreadTuner, ways

SPIN, SLEEP, ONE = Threading(2, "spin"), Threading(2, "sleep"), Threading(1, "sleep")
TWO_CORES = ways(2, may_spin=True, may_sleep=True, may_reduce=True)
ALONE = {SPIN: 1.0, SLEEP: 1.2, ONE: 1.8}
BESIDE = {SPIN: 30.0, SLEEP: 2.2, ONE: 2.0}  # a process that loops
_STEP_S, _NOISE = 0.008, 0.08


class Run:
    """Steps for some seconds: `slowness` of each way at a time, and what the system says of others."""

    def __init__(
        self,
        seconds: float,
        slowness: Callable[[float], dict[Threading, float]],
        contended: Callable[[float], bool | None],
        seed: int = 0,
    ) -> None:
        rng, self.tuner = random.Random(seed), ThreadTuner(TWO_CORES)
        self.now_s = 0.0
        self.steps: list[tuple[float, Threading, float, float]] = []  # when, way, seconds, of the best way
        while self.now_s < seconds:
            rows = rng.choice((1, 1, 1, 4, 8))
            way = self.tuner.choose(contended(self.now_s))
            weight = 1 + 0.1 * rows
            by_way = slowness(self.now_s)
            step_s = _STEP_S * weight * by_way[way] * rng.gauss(1, _NOISE)
            self.steps.append((self.now_s, way, step_s, _STEP_S * weight * min(by_way.values())))
            self.now_s += step_s
            self.tuner.observe(step_s, weight, self.now_s)

    def share_of(self, way: Threading, start_s: float, end_s: float) -> float:
        """Share of the steps between two times that ran so."""
        own = [one for at_s, one, _, _ in self.steps if start_s <= at_s < end_s]
        return own.count(way) / len(own)

    def loss(self, start_s: float, end_s: float) -> float:
        """Time beyond that of the best way, as a share of the latter."""
        pairs = [(took_s, best_s) for at_s, _, took_s, best_s in self.steps if start_s <= at_s < end_s]
        return sum(took_s for took_s, _ in pairs) / sum(best_s for _, best_s in pairs) - 1

    def num_changes(self, start_s: float = 0.0) -> int:
        """How often the way changed from one step to the next."""
        own = [way for at_s, way, _, _ in self.steps if at_s >= start_s]
        return sum(one != other for one, other in itertools.pairwise(own))


@pytest.mark.parametrize("seed", range(4))
def test_alone_threads_spin_and_trials_cost_little(seed: int) -> None:
    run = Run(30, lambda _: ALONE, lambda _: False, seed)
    assert run.share_of(SPIN, 1, 30) > 0.97
    assert run.loss(1, 30) < 0.012


@pytest.mark.parametrize("seed", range(4))
def test_a_neighbour_that_comes_and_goes_is_followed(seed: int) -> None:
    def is_there(at_s: float) -> bool:
        return 10 <= at_s < 20

    run = Run(30, lambda at_s: BESIDE if is_there(at_s) else ALONE, lambda at_s: is_there(at_s - 0.5), seed)
    assert run.share_of(SPIN, 11.5, 20) == 0
    assert run.loss(12, 20) < 0.12  # the two other ways are nearly equal
    assert run.share_of(SPIN, 21, 30) > 0.9
    assert run.loss(21.5, 30) < 0.015


@pytest.mark.parametrize("contended", [True, None])
def test_fewer_threads_run_where_they_are_faster(contended: bool | None) -> None:
    slowness = {SPIN: 30.0, SLEEP: 6.0, ONE: 2.0}
    run = Run(30, lambda _: slowness, lambda _: contended)
    assert run.tuner.current == ONE
    assert run.share_of(ONE, 5, 30) > 0.95
    assert run.loss(10, 30) < 0.12


def test_what_no_counter_tells_is_seen_in_the_steps() -> None:
    run = Run(40, lambda at_s: BESIDE if 10 <= at_s < 25 else ALONE, lambda _: None)
    assert run.share_of(SPIN, 1, 10) > 0.95
    assert run.share_of(SPIN, 14, 25) < 0.05
    assert run.share_of(SPIN, 32, 40) > 0.9


def test_noise_makes_no_change_of_ways_that_are_equal() -> None:
    run = Run(60, lambda _: {SPIN: 30.0, SLEEP: 1.0, ONE: 1.02}, lambda _: True)
    assert run.num_changes(1.0) < 150
    assert run.loss(1, 60) < 0.02


def test_a_hopeless_trial_ends_at_its_first_step() -> None:
    run = Run(30, lambda _: {**ALONE, ONE: 40.0}, lambda _: False)
    assert sum(way == ONE for _, way, _, _ in run.steps) <= 4


def test_a_way_twice_as_slow_costs_one_step_of_an_answer() -> None:
    first_answer = Run(0.4, lambda _: ALONE, lambda _: False).steps
    assert [way for _, way, _, _ in first_answer].count(ONE) == 1


def test_steps_that_may_not_be_compared_run_the_present_way() -> None:
    tuner = ThreadTuner(TWO_CORES)
    for _ in range(8):
        tuner.choose(False)
        if tuner.is_trial:
            break
        tuner.observe(0.01, 1.0, 0.0)
    assert tuner.is_trial
    assert tuner.present(False) == SPIN


def test_the_ways_that_are_left_by_what_was_set() -> None:
    assert TWO_CORES == (SPIN, SLEEP, ONE)
    assert ways(1, True, True, True) == ()
    assert ways(2, True, True, False) == (SPIN, SLEEP)
    assert ways(2, False, True, True) == (SLEEP, ONE)
    assert ways(2, True, False, True) == (SPIN, Threading(1, "spin"))
    assert [way.num_threads for way in ways(16, False, True, True)] == [16, 15, 8, 4, 2, 1]
