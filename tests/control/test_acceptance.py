"""Estimates against simulated rounds whose chances are known."""

from __future__ import annotations

import random

import pytest

from foretoken.control.acceptance import PlaceAcceptance, RequestAcceptance


def simulate(
    survival: PlaceAcceptance | RequestAcceptance,
    chance: float,
    budget: int,
    rounds: int,
    rng: random.Random,
    match: float = 1.0,
) -> None:
    """Rounds of chains with `chance` per guess; a lookup that finds something in a share `match` of the rounds."""
    for _ in range(rounds):
        if rng.random() >= match:
            survival.observe(budget, [])
            continue
        length = next((i for i in range(budget) if rng.random() >= chance), budget)
        survival.observe(budget, [float(i < length) for i in range(budget)])


def test_before_anything_is_known_chances_fall_by_place() -> None:
    drafted, emitted = PlaceAcceptance().shares(4)
    assert drafted == [1.0] * 4
    assert emitted == pytest.approx([0.6, 0.36, 0.216, 0.1296])


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_estimates_follow_the_truth_also_behind_the_budget(chance: float) -> None:
    """The budget cuts the view off at place 4; deeper places go on at the same rate instead of being taken for
    failures.
    """
    rng, means = random.Random(1), [0.0] * 8
    for _ in range(200):
        survival = PlaceAcceptance()
        simulate(survival, chance, 4, 60, rng)
        means = [mean + value / 200 for mean, value in zip(means, survival.shares(8)[1], strict=True)]
    assert means[:4] == pytest.approx([chance ** (i + 1) for i in range(4)], abs=0.08)
    assert means[7] == pytest.approx(chance**8, abs=0.15)


def test_what_is_seldom_guessed_costs_seldom() -> None:
    survival = PlaceAcceptance()
    simulate(survival, 0.9, 6, 300, random.Random(2), match=0.1)
    drafted, emitted = survival.shares(6)
    assert drafted[0] < 0.4
    assert all(e <= d for d, e in zip(drafted, emitted, strict=True))


def test_a_request_that_changes_is_followed_within_a_few_rounds() -> None:
    """All places move at once, down and up again, though its kind has been seen to be good all along."""
    kind, rng = PlaceAcceptance(), random.Random(3)
    simulate(kind, 0.9, 4, 200, rng)
    request = RequestAcceptance(kind)
    simulate(request, 0.9, 4, 50, rng)
    before = request.shares(4)[1]
    assert before[3] > 0.4
    simulate(request, 0.0, 4, 8, rng)
    assert request.shares(4)[1][0] < 0.3
    simulate(request, 0.9, 4, 12, rng)
    assert request.shares(4)[1] == pytest.approx(before, abs=0.25)


def test_a_request_that_stays_as_it_is_is_known_better_than_by_its_last_rounds() -> None:
    rng, far = random.Random(5), 0.0
    kind = PlaceAcceptance()
    simulate(kind, 0.5, 4, 300, rng)
    request = RequestAcceptance(kind)
    simulate(request, 0.7, 4, 100, rng)
    for _ in range(100):
        simulate(request, 0.7, 4, 1, rng)
        far += (request.shares(1)[1][0] - 0.7) ** 2 / 100
    assert far**0.5 < 0.1  # ten rounds alone scatter by 0.14


def test_what_all_requests_show_fades_with_new_rounds_only() -> None:
    survival, rng = PlaceAcceptance(), random.Random(3)
    simulate(survival, 0.9, 4, 200, rng)
    assert survival.shares(1)[1][0] > 0.6
    simulate(survival, 0.0, 4, 100, rng)
    assert survival.shares(1)[1][0] < 0.2


def test_a_place_that_failed_by_chance_is_tried_again() -> None:
    """Rounds with a budget of one guess say nothing of the second, so what is known of it fades towards what the first
    one does.
    """
    survival = PlaceAcceptance()
    for _ in range(30):
        survival.observe(2, [1.0, 0.0])
    assert survival.shares(2)[1][1] < 0.15
    for _ in range(800):
        survival.observe(1, [1.0])
    assert survival.shares(2)[1][1] > 0.5


def test_a_new_request_begins_where_the_others_are() -> None:
    drafter = PlaceAcceptance()
    simulate(drafter, 0.05, 4, 100, random.Random(4))
    request = RequestAcceptance(drafter)
    assert request.shares(2) == drafter.shares(2)
    assert request.shares(2)[1][0] < 0.25
    for _ in range(10):
        request.observe(2, [1.0, 1.0])
    emitted = request.shares(6)[1]
    assert emitted[0] > 0.7
    assert emitted == sorted(emitted, reverse=True)
