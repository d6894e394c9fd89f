"""The machine becomes slower or faster in the middle of an answer, drafting more than the target: simulated clocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foretoken.control.cost import DraftCosts
from foretoken.control.policy import BudgetPolicy
from tests.helpers.control import observe, options_of, plan

SLOW_FROM, SLOW_UNTIL = 100, 200  # steps
_PLAIN_S, _ACCEPTED, _NOISE = 0.1, 0.8, 0.05


class Answer:
    """Steps of `num_requests` with a draft model; beside a neighbour the target takes 3 times as long, drafting 10
    times. `num_drafted`, `seconds` and `num_emitted` are by step.
    """

    def __init__(self, draft_s: float, seed: int, num_requests: int = 1) -> None:
        rng, policy = random.Random(seed), BudgetPolicy()
        self.num_drafted: list[int] = []
        self.seconds: list[float] = []
        self.num_emitted: list[int] = []
        self.plain_s = _PLAIN_S * (1 + 0.01 * num_requests)
        self.num_requests = num_requests
        for step in range(400):
            is_slow = SLOW_FROM <= step < SLOW_UNTIL
            requests = [options_of(number, "d", 8) for number in range(num_requests)]
            given = plan(policy, requests)
            drafted = [one.num_draft for one in given]
            kept = [next((k for k in range(n) if rng.random() >= _ACCEPTED), n) for n in drafted]
            target_s = _PLAIN_S * (1 + 0.01 * (num_requests + sum(drafted))) * (3 if is_slow else 1)
            spent_s = draft_s * max(drafted) * (10 if is_slow else 1)
            target_s, spent_s = target_s * rng.gauss(1, _NOISE), spent_s * rng.gauss(1, _NOISE)
            observe(policy, requests, given, kept, target_s, {"d": spent_s} if spent_s else {})
            self.num_drafted.append(sum(drafted))
            self.seconds.append(target_s + spent_s)
            self.num_emitted.append(num_requests + sum(kept))

    def steps_with_draft(self, first: int, last: int) -> int:
        return sum(map(bool, self.num_drafted[first:last]))

    def over_plain(self, first: int, last: int, slower: float = 1.0) -> float:
        """Tokens per second over plain decoding on a machine that is so much slower."""
        plain = self.num_requests / (self.plain_s * slower)
        return sum(self.num_emitted[first:last]) / sum(self.seconds[first:last]) / plain


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("draft_s", [0.03, 0.04])
def test_speculation_that_stopped_paying_stops_within_20_steps(draft_s: float, num_requests: int) -> None:
    """A draft token takes as long as a plain step then, or more; single trials remain."""
    answers = [Answer(draft_s, seed, num_requests) for seed in range(6)]
    for answer in answers:
        assert answer.steps_with_draft(SLOW_FROM, SLOW_FROM + 20) <= 9
        assert answer.steps_with_draft(SLOW_FROM + 20, SLOW_UNTIL) <= 12
        assert answer.over_plain(SLOW_FROM + 20, SLOW_UNTIL, slower=3.0) > 0.94


def test_speculation_resumes_when_it_pays_again() -> None:
    """What drafting took beside the neighbour is forgotten with the neighbour. The account may have to be paid back
    first, which takes some 50 steps.
    """
    for draft_s in (0.02, 0.03, 0.04):
        for seed in range(4):
            answer = Answer(draft_s, seed)
            assert answer.steps_with_draft(SLOW_UNTIL + 80, SLOW_UNTIL + 120) >= 36
            assert answer.over_plain(SLOW_UNTIL + 80, 400) > 1.1


def test_speculation_that_still_pays_goes_on() -> None:
    answer = Answer(0.005, seed=0)
    assert answer.steps_with_draft(SLOW_FROM, SLOW_UNTIL) >= 95
    assert answer.over_plain(SLOW_FROM, SLOW_UNTIL, slower=3.0) > 1.4


@pytest.fixture
def costs() -> Callable[[float, int], DraftCosts]:
    def make(plain_s: float, num_requests: int) -> DraftCosts:
        found = DraftCosts()
        found.observe("d", 4, 0.4, num_requests, 0)
        found.observe("d", 4, 1.4, num_requests, 100)
        found.keep_pace("d", num_requests, plain_s)
        return found

    return make


def test_costs_of_another_pace_are_dropped(costs: Callable[[float, int], DraftCosts]) -> None:
    """Reading is a pass of the draft over many rows: its price follows the target's pace."""
    for now_s in (0.3, 0.03):
        found = costs(0.1, 2)
        found.drop_outpaced(2, now_s)
        assert not found.knows("d")
        assert found.read_s("d", 100) == pytest.approx(1.0 * now_s / 0.1)


def test_costs_of_the_same_pace_or_of_another_load_stay(costs: Callable[[float, int], DraftCosts]) -> None:
    for num_requests, now_s in ((2, 0.15), (2, 0.07), (16, 0.3)):
        found = costs(0.1, 2)
        found.drop_outpaced(num_requests, now_s)
        assert found.seconds("d", 4, 2) == pytest.approx(0.4)
        assert found.read_s("d", 100) == pytest.approx(1.0)
