"""Learn, judge, offer, return: with a learner whose weights are a number that says how good they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from foretoken.adapt.adaptation import Adaptation, Rest, Weights
from foretoken.adapt.buffer import ExampleBuffer, Window
from foretoken.control.adaptation import AdaptConfig
from tests.adapt.test_buffer import fill


class NumberLearner:
    """Its score is its weight, give or take a little; `step` says what learning makes of it."""

    def __init__(self, step: Callable[[float], float]) -> None:
        self.step, self.value, self.num_learnt, self.num_restarts = step, 1.0, 0, 0
        self.quality: Callable[[float, Window], float] = lambda value, _: value

    def learn(self, window: Window) -> None:
        self.value = self.step(self.value)
        self.num_learnt += window.num_rows

    def score(self, weights: Weights, window: Window) -> float:
        return self.quality(float(weights["value"]), window) + 0.001 * (window.number % 3)

    def weights(self) -> Weights:
        return {"value": torch.tensor(self.value)}

    def restart(self, weights: Weights) -> None:
        self.value = float(weights["value"])
        self.num_restarts += 1


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Stage:
    def __init__(self, step: Callable[[float], float], swap_interval_s: float = 0.0) -> None:
        self.buffer, self.learner, self.clock = ExampleBuffer((1,), 100_000), NumberLearner(step), Clock()
        config = AdaptConfig(swap_interval_s=swap_interval_s)
        self.adaptation = Adaptation("eagle", self.buffer, self.learner, config, self.clock)
        self.units = self.adaptation.work()
        self.in_use = 1.0

    def run(self, num_units: int = 2000) -> None:
        """Until there is nothing to do, or an offer."""
        for _ in range(num_units):
            if next(self.units) is Rest.LONG:
                return

    def take(self) -> None:
        offer = self.adaptation.offer
        assert offer is not None
        self.in_use = float(offer.weights["value"])
        self.adaptation.taken(offer)


def test_better_weights_are_offered_once_and_with_a_new_version() -> None:
    stage = Stage(lambda value: value + 0.01)
    fill(stage.buffer, 40)
    stage.run()
    offer = stage.adaptation.offer
    assert offer is not None
    assert offer.version == 1
    assert stage.adaptation.state.version == 0
    before = stage.learner.num_learnt
    stage.run()
    assert stage.learner.num_learnt == before, "nothing is learnt while an offer waits"
    stage.take()
    assert stage.in_use == pytest.approx(1.48)
    state = stage.adaptation.state
    assert (state.version, state.num_swaps, state.num_returns) == (1, 1, 0)
    assert state.after is not None
    assert state.before is not None
    assert state.after - state.before == pytest.approx(0.48)


@pytest.mark.parametrize("step", [lambda value: value - 0.01, lambda value: value, lambda _: float("nan")])
def test_worse_or_broken_weights_are_never_offered(step: Callable[[float], float]) -> None:
    stage = Stage(step)
    fill(stage.buffer, 40)
    for _ in range(20):
        stage.run()
        assert stage.adaptation.offer is None
    assert stage.adaptation.state.num_judged > 3
    assert (stage.learner.num_restarts > 0) == (step(1.0) != 1.0), "it begins again from the weights in use"


def test_a_change_that_newer_text_does_not_confirm_is_taken_back() -> None:
    """Better on the text of its time, worse on what comes."""
    stage = Stage(lambda value: min(1.3, value + 0.01))
    fill(stage.buffer, 40)
    stage.run()
    stage.take()
    first_new = stage.buffer.num_windows
    stage.learner.quality = lambda value, window: 2 - value if window.number >= first_new else value
    stage.run(200)
    assert stage.adaptation.state.num_returns == 0, "no newer text yet"
    fill(stage.buffer, 40)
    stage.run()
    assert stage.adaptation.state.num_returns == 1
    stage.take()
    assert stage.in_use == 1.0
    assert stage.adaptation.state.version == 2
    assert stage.learner.value == 1.0, "learning goes on from the earlier weights"


def test_a_change_that_newer_text_confirms_stays() -> None:
    stage = Stage(lambda value: min(1.3, value + 0.01))
    fill(stage.buffer, 40)
    stage.run()
    stage.take()
    fill(stage.buffer, 40)
    for _ in range(10):
        stage.run()
    assert stage.adaptation.state.num_returns == 0
    assert stage.adaptation.offer is None
    assert stage.in_use == pytest.approx(1.3)


def test_weights_change_no_more_often_than_the_interval() -> None:
    stage = Stage(lambda value: value + 0.01, swap_interval_s=10.0)
    changes = []
    for second in range(40):
        stage.clock.now_s = float(second)
        fill(stage.buffer, 8)
        stage.run()
        if stage.adaptation.offer is not None:
            stage.take()
            changes.append(second)
    assert len(changes) >= 3
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(changes))


def test_text_is_learnt_a_bounded_number_of_times() -> None:
    stage = Stage(lambda value: value)
    fill(stage.buffer, 40)
    for _ in range(50):
        stage.run()
    assert stage.learner.num_learnt <= 8 * stage.buffer.num_added + 128
    assert stage.learner.num_learnt >= 8 * stage.buffer.num_added
    assert next(stage.units) is Rest.LONG, "an idle server does not learn for ever"


def test_without_held_out_text_nothing_is_learnt() -> None:
    stage = Stage(lambda value: value + 1)
    fill(stage.buffer, 3)
    stage.run()
    assert stage.learner.num_learnt == 0
