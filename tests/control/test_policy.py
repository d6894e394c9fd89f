"""The policy in a world whose costs and chances are known: never much below plain, near the best fixed number, quick to
recover.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from foretoken.control.candidates import Preview, weight_of
from foretoken.control.config import PolicyConfig
from foretoken.control.policy import BudgetPolicy
from foretoken.plan.profile import Curve
from tests.helpers.control import observe, options_of, plan

MOST = PolicyConfig.max_num_draft


class World:
    """Requests that draft chains with a chance per draft token, a target whose step time bends at `free` rows, a
    drafter with a price per draft token.
    """

    def __init__(self, free: float = 12, price_s: float = 0.0, noise: float = 0.0, seed: int = 0) -> None:
        self.free, self.price_s, self.noise, self.rng = free, price_s, noise, random.Random(seed)
        self.seconds, self.tokens = 0.0, 0

    def step(self, budgets: list[int], chances: list[float]) -> tuple[float, float, list[list[float]]]:
        """One round: seconds of target and drafter, and which draft tokens stood."""
        rows = len(budgets) + sum(budgets)
        target_s = max(1.0, 0.95 + 0.05 * rows, rows / self.free) * (1 + self.noise * self.rng.uniform(-1, 1))
        draft_s = self.price_s * max(budgets, default=0)
        stood = []
        for budget, chance in zip(budgets, chances, strict=True):
            length = next((i for i in range(budget) if self.rng.random() >= chance), budget)
            stood.append([float(i < length) for i in range(budget)])
            self.tokens += 1 + length
        self.seconds += target_s + draft_s
        return target_s, draft_s, stood

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def run(
    world: World, chance: Callable[[int, int], float], rounds: int, batch: int, fixed: int | None = None
) -> BudgetPolicy:
    """`chance(round, request)`; a fixed number instead of the policy where it is given: then it learns nothing."""
    policy = BudgetPolicy()
    for turn in range(rounds):
        if fixed is not None:
            world.step([fixed] * batch, [chance(turn, b) for b in range(batch)])
            continue
        requests = [options_of(b, "d", MOST) for b in range(batch)]
        budgets = plan(policy, requests)
        counts = [budget.num_draft for budget in budgets]
        target_s, draft_s, stood = world.step(counts, [chance(turn, b) for b in range(batch)])
        observe(policy, requests, budgets, [round(sum(places)) for places in stood], target_s, {"d": draft_s})
    return policy


def test_reading_a_prompt_does_not_make_a_drafter_expensive() -> None:
    """The first draft of every request takes ten steps of the target; the others are what counts."""
    policy, started = BudgetPolicy(), set()
    for number in range(8):
        for _ in range(30):
            requests = [options_of(number, "d", 8, num_tokens=100)]
            budgets = plan(policy, requests)
            count = budgets[0].num_draft
            new = count > 0 and number not in started
            observe(policy, requests, budgets, [count], 1.0, {"d": 10.0 if new else 0.01 * count}, {"d": 100 * new})
            if new:
                started.add(number)
        assert count == 8
        policy.finish(number)


BATCHES = (1, 4, 16)
CHANCES = ((0.0, 0.0), (0.05, 0.2), (0.3, 0.3), (0.5, 0.25), (0.8, 0.25), (0.9, 0.0), (1.0, 0.05))


def check_speed(batch: int, chance: float, price_s: float) -> None:
    """The policy against every fixed number in one world, for proof/test_policy.py."""

    def speed(fixed: int | None) -> float:
        world = World(price_s=price_s, noise=0.05)
        run(world, lambda *_: chance, 600, batch, fixed)
        return world.tokens_per_s

    chosen, plain = speed(None), speed(0)
    best = max(speed(fixed) for fixed in (0, 1, 2, 3, 4, 6, 8, 12, 16))
    assert chosen >= 0.96 * plain
    assert chosen >= 0.9 * best  # 600 rounds with a noisy clock; the first ones are spent on finding out


def test_recovers_within_fifty_rounds_when_acceptance_changes() -> None:
    """Draft tokens stop being right and, much later, begin again: the policy stops drafting and begins again."""
    for price_s in (0.0, 0.25):
        budgets, times = [], []
        policy, world = BudgetPolicy(), World(price_s=price_s)
        for turn in range(900):
            requests = [options_of(0, "d", 16)]
            (budget,) = plan(policy, requests)
            chance = 0.85 if not 300 <= turn < 600 else 0.0
            target_s, draft_s, (places,) = world.step([budget.num_draft], [chance])
            observe(policy, requests, [budget], [round(sum(places))], target_s, {"d": draft_s})
            budgets.append(budget.num_draft)
            times.append(target_s + draft_s)
        assert sum(budgets[200:300]) > 200
        assert sum(times[350:600]) < 1.04 * 250  # trials only: the cheaper a draft token, the more of them
        assert sum(budgets[650:700]) > 100


def test_requests_of_one_batch_are_told_apart() -> None:
    """Half of them copy, half are novel: the rows go to those that copy."""
    world = World(free=24)
    policy = run(world, lambda _turn, b: 0.9 if b % 2 else 0.05, 300, 8)
    budgets = [grant.num_draft for grant in plan(policy, [options_of(b, "d", MOST) for b in range(8)])]
    assert sum(budgets[1::2]) > 6 * max(1, sum(budgets[0::2]))


def test_load_takes_draft_tokens_away_and_gives_them_back() -> None:
    world = World(free=12)
    policy = run(world, lambda *_: 0.7, 100, 24)
    assert sum(own.num_draft for own in plan(policy, [options_of(b, "d", MOST) for b in range(24)])) <= 12
    alone = World(free=12)
    policy = run(alone, lambda *_: 0.7, 100, 1)
    assert plan(policy, [options_of(0, "d", MOST)])[0].num_draft >= 3


def test_rows_go_to_those_in_a_hurry() -> None:
    """Four texts of a kind and room for few draft tokens: the one that counts more is given more; alone its weight
    changes nothing.
    """
    policy = run(World(free=10), lambda *_: 0.9, 100, 4)
    wishes = [options_of(b, "d", 8, True)._replace(weight=3.0 if b == 2 else 1.0) for b in range(4)]
    budgets = [grant.num_draft for grant in plan(policy, wishes)]
    assert budgets[2] > max(budgets[0], budgets[1], budgets[3])
    alone = run(World(), lambda *_: 0.7, 100, 1)
    plans = [plan(alone, [options_of(0, "d", 8, True)._replace(weight=weight)]) for weight in (0.3, 1.0, 4.0)]
    assert plans[0] == plans[1] == plans[2]


def test_weights() -> None:
    assert weight_of(0, None, 9.0) == weight_of(0, 10.0, 9.0) == 1.0
    assert weight_of(0, 8.0, 9.0) == 2.0
    assert weight_of(-1, None, 0.0) == pytest.approx(1.2)
    assert weight_of(100, None, 0.0) == weight_of(8, None, 0.0) > 0.2


def test_what_the_caller_set_stands_whatever_was_learnt() -> None:
    policy = run(World(price_s=5.0), lambda *_: 0.0, 100, 1)
    grants = plan(policy, [options_of(0, "d", 7, False), options_of(1, None, 0), options_of(2, "d", 0)])
    assert [grant.num_draft for grant in grants] == [7, 0, 0]


def test_a_finished_request_is_forgotten() -> None:
    policy = run(World(), lambda *_: 0.5, 20, 3)
    for b in range(3):
        policy.finish(b)
    assert not policy._requests
    assert not policy.acceptance._requests


def test_trials_ask_one_request_at_a_time_and_cost_little() -> None:
    """A drafter that costs more than it brings, though its draft tokens would pay for their rows, is tried now and
    then.
    """
    policy, world, asked = BudgetPolicy(), World(free=24, price_s=1.5), list[int]()
    for turn in range(1000):
        requests = [options_of(b, "d", 8) for b in range(8)]
        given = plan(policy, requests)
        budgets = [budget.num_draft for budget in given]
        target_s, draft_s, stood = world.step(budgets, [0.6] * 8)
        observe(policy, requests, given, [round(sum(places)) for places in stood], target_s, {"d": draft_s})
        if turn == 100:
            world.seconds, world.tokens = 0.0, 0
        elif turn > 100 and any(budgets):
            asked.append(sum(map(bool, budgets)))
    assert 2 <= len(asked) < 60
    assert max(asked) == 1
    assert world.tokens_per_s > 0.97 * 8 / 1.35  # of plain: one row each


@pytest.mark.parametrize("num_set", [0, 1])
@pytest.mark.parametrize(("decisions_per_trial", "learns"), [(PolicyConfig.decisions_per_trial, True), (10**9, False)])
def test_what_rows_take_is_tried_where_no_draft_token_seems_to_pay(
    decisions_per_trial: int, learns: bool, num_set: int
) -> None:
    """A profile says that a row takes as long as a token brings; here it takes a third of it. One draft token that a
    caller set is no choice of the controller's.
    """
    policy = BudgetPolicy(PolicyConfig(decisions_per_trial=decisions_per_trial))
    policy.seed(Curve(((1, 1.0), (8, 8.0), (64, 64.0))), {})
    shown = Preview(tuple(range(-1, 3)), (0.9, 0.81, 0.73, 0.66), (1, 2, 3, 4))
    seconds = tokens = 0.0
    for turn in range(600):
        requests = [options_of(b, "lookup", 4, preview=shown) for b in range(8 - num_set)]
        requests += [options_of(b, "lookup", 1, False, preview=shown) for b in range(8 - num_set, 8)]
        budgets = plan(policy, requests)
        kept = [budget.num_draft for budget in budgets]
        target_s = 8.0 + 0.33 * sum(kept)
        observe(policy, requests, budgets, kept, target_s)
        if turn >= 500:
            seconds, tokens = seconds + target_s, tokens + 8 + sum(kept)
    assert (tokens / seconds > 1.5) == learns


@pytest.mark.parametrize("seed", range(3))
def test_where_a_row_costs_what_a_token_brings_little_is_lost(seed: int) -> None:
    """Sixteen rows that are bound by compute: a draft token pays only if it is right nine times in ten."""
    rng, policy = random.Random(seed), BudgetPolicy()
    policy.seed(Curve(tuple((rows, 0.001 + 0.00175 * rows) for rows in (1, 2, 4, 8, 16, 32))), {})
    preview = Preview((-1, 0, 1), (0.8, 0.72, 0.68), (7, 7, 7))
    plain_s = took_s = 0.0
    num_trials = 0
    for step in range(600):
        requests = [options_of(number, "d", 3, preview=preview) for number in range(16)]
        budgets = plan(policy, requests)
        rows = 16 + sum(one.num_draft for one in budgets)
        accepted = [next((k for k in range(one.num_draft) if rng.random() > 0.8), one.num_draft) for one in budgets]
        step_s = (0.001 + 0.00175 * rows) * rng.gauss(1, 0.05)
        for request in requests:
            policy.observe_preview(request.request_id, "d", preview, [rng.random() < 0.8, None, None])
        observe(policy, requests, budgets, accepted, step_s)
        if step >= 50:
            took_s += step_s
            plain_s += (0.001 + 0.00175 * 16) * (16 + sum(accepted)) / 16
            num_trials += rows >= 24
    assert plain_s / took_s > 0.985
    assert num_trials < 25
