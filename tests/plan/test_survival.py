"""Estimates against simulated rounds whose chances are known."""

from __future__ import annotations

import random

import pytest

from foretoken.plan.survival import Survival


def simulate(survival: Survival, chance: float, budget: int, rounds: int, rng: random.Random, match: float = 1.0) -> None:
    """Rounds of chains with `chance` per guess; a lookup that finds something in a share `match` of the rounds."""
    for _ in range(rounds):
        if rng.random() >= match:
            survival.observe(budget, [])
            continue
        length = next((i for i in range(budget) if rng.random() >= chance), budget)
        survival.observe(budget, [float(i < length) for i in range(budget)])


def test_before_anything_is_known_chances_fall_by_place() -> None:
    drafted, emitted = Survival().shares(4)
    assert drafted == [1.0] * 4
    assert emitted == pytest.approx([0.6, 0.36, 0.216, 0.1296])


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_estimates_follow_the_truth_also_behind_the_budget(chance: float) -> None:
    """The budget cuts the view off at place 4; deeper places go on at the same rate instead of being taken for failures."""
    rng, means = random.Random(1), [0.0] * 8
    for _ in range(200):
        survival = Survival()
        simulate(survival, chance, 4, 60, rng)
        means = [mean + value / 200 for mean, value in zip(means, survival.shares(8)[1], strict=True)]
    assert means[:4] == pytest.approx([chance ** (i + 1) for i in range(4)], abs=0.08)
    assert means[7] == pytest.approx(chance**8, abs=0.15)


def test_what_is_seldom_guessed_costs_seldom() -> None:
    survival = Survival()
    simulate(survival, 0.9, 6, 300, random.Random(2), match=0.1)
    drafted, emitted = survival.shares(6)
    assert drafted[0] < 0.4
    assert all(e <= d for d, e in zip(drafted, emitted, strict=True))


def test_old_rounds_are_forgotten() -> None:
    survival, rng = Survival(), random.Random(3)
    simulate(survival, 0.9, 4, 200, rng)
    assert survival.shares(1)[1][0] > 0.6
    simulate(survival, 0.0, 4, 30, rng)
    assert survival.shares(1)[1][0] < 0.2


def test_a_new_request_begins_where_the_others_are() -> None:
    drafter = Survival()
    simulate(drafter, 0.05, 4, 100, random.Random(4))
    request = Survival(drafter)
    assert request.shares(2)[1][0] < 0.25
    for _ in range(10):
        request.observe(2, [1.0, 1.0])
    emitted = request.shares(6)[1]
    assert emitted[0] > 0.7
    assert emitted == sorted(emitted, reverse=True)
