"""Estimates against simulated rounds whose chances are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from foretoken.control.acceptance import Acceptance, ChanceRates, PlaceRates
from foretoken.control.candidates import DraftBudget, Preview, RoundOutcome

Observe = Callable[[int, Sequence[float]], None]  # draft tokens offered, and the chance with which each was emitted


def simulate(observe: Observe, chance: float, budget: int, rounds: int, rng: random.Random, match: float = 1.0) -> None:
    """Rounds of chains with `chance` per draft token; a lookup that matches in a share `match` of the rounds."""
    for _ in range(rounds):
        if rng.random() >= match:
            observe(budget, [])
            continue
        length = next((i for i in range(budget) if rng.random() >= chance), budget)
        observe(budget, [float(i < length) for i in range(budget)])


def by_place(rates: PlaceRates) -> Observe:
    return lambda budget, chances: rates.observe(
        budget, chances, range(-1, len(chances) - 1), range(sum(map(bool, chances)))
    )


def by_request(acceptance: Acceptance, request_id: int, slice_: str = "") -> Observe:
    acceptance.begin(request_id, slice_)
    return lambda budget, chances: acceptance.observe_round(
        "d", chain_round(request_id, budget, chances, sum(map(bool, chances)))
    )


def chain_round(request_id: int, budget: int, chances: Sequence[float], num_accepted: int) -> RoundOutcome:
    parents, path = range(-1, len(chances) - 1), range(num_accepted)
    return RoundOutcome(request_id, DraftBudget(0, budget), chances, parents, path, (0,) * (num_accepted + 1))


def emitted_of(rates: PlaceRates, num_places: int) -> list[float]:
    """The chance of each draft token of a chain to be emitted."""
    emitted: list[float] = []
    for drafted, once, _ in rates.estimates(num_places):
        emitted.append(min(drafted, once * (emitted[-1] if emitted else 1.0)))
    return emitted


def chain(*steps: float) -> Preview:
    chances, product = [], 1.0
    for step in steps:
        product *= step
        chances.append(product)
    return Preview(tuple(range(-1, len(steps) - 1)), tuple(chances), (0,) * len(steps))


def test_before_anything_is_known_chances_fall_by_place() -> None:
    acceptance = Acceptance()
    acceptance.begin(0, "")
    drafted, emitted = acceptance.of_places(0, "d", 4)
    assert drafted == (1.0,) * 4
    assert emitted == pytest.approx([0.6, 0.36, 0.216, 0.1296])


@pytest.mark.parametrize("easy", [(0.5, 0.8, 0.7), (1.0, 1.0, 1.0)])
def test_chances_of_sampled_draft_tokens_are_those_given_that_the_one_before_was_emitted(
    easy: tuple[float, ...],
) -> None:
    """A rule tells each chance whether its token was then emitted or not. Every other round is hard, so that places
    of one round are alike: what stands behind an emitted token is mostly of an easy one.
    """
    acceptance, rng, seen = Acceptance(), random.Random(4), [0.0] * 3
    for number in range(2000):
        acceptance.begin(number, "")
        told = easy if number % 2 else (0.1, 0.1, 0.1)
        length = next((i for i in range(3) if rng.random() >= told[i]), 3)
        chances = [chance if place <= length else 0.0 for place, chance in enumerate(told)]
        acceptance.observe_round("d", chain_round(number, 3, chances, length))
        acceptance.finish(number)
        seen = [0.99 * mean + 0.01 * value for mean, value in zip(seen, _emitted_of(acceptance), strict=True)]
    true, reached = [], [0.5, 0.5]
    for place in range(3):
        reached = [share * chance for share, chance in zip(reached, (easy[place], 0.1), strict=True)]
        true.append(sum(reached))
    assert seen == pytest.approx(true, abs=0.04)


def _emitted_of(acceptance: Acceptance) -> Sequence[float]:
    acceptance.begin(-1, "")
    try:
        return acceptance.of_places(-1, "d", 3)[1]
    finally:
        acceptance.finish(-1)


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_estimates_follow_the_truth_also_beyond_the_budget(chance: float) -> None:
    """The budget ends the draft at place 4; deeper places go on at the same rate and are not taken for failures."""
    rng, means = random.Random(1), [0.0] * 8
    for _ in range(200):
        rates = PlaceRates()
        simulate(by_place(rates), chance, 4, 60, rng)
        means = [mean + value / 200 for mean, value in zip(means, emitted_of(rates, 8), strict=True)]
    assert means[:4] == pytest.approx([chance ** (i + 1) for i in range(4)], abs=0.08)
    assert means[7] == pytest.approx(chance**8, abs=0.15)


def test_what_is_seldom_drafted_costs_seldom() -> None:
    acceptance = Acceptance()
    simulate(by_request(acceptance, 0), 0.9, 6, 300, random.Random(2), match=0.1)
    drafted, emitted = acceptance.of_places(0, "d", 6)
    assert drafted[0] < 0.4
    assert all(e <= d for d, e in zip(drafted, emitted, strict=True))


def test_a_request_that_changes_is_followed_within_a_few_rounds() -> None:
    """All places move at once, down and up again, though the slice has been good all along."""
    acceptance, rng = Acceptance(), random.Random(3)
    simulate(by_request(acceptance, 0), 0.9, 4, 200, rng)
    observe = by_request(acceptance, 1)
    simulate(observe, 0.9, 4, 50, rng)
    before = acceptance.of_places(1, "d", 4)[1]
    assert before[3] > 0.4
    simulate(observe, 0.0, 4, 15, rng)
    assert acceptance.of_places(1, "d", 4)[1][0] < 0.4
    simulate(observe, 0.9, 4, 20, rng)
    assert acceptance.of_places(1, "d", 4)[1] == pytest.approx(before, abs=0.25)


def test_a_request_that_stays_as_it_is_is_known_better_than_by_its_last_rounds() -> None:
    rng, far, acceptance = random.Random(5), 0.0, Acceptance()
    simulate(by_request(acceptance, 0), 0.5, 4, 300, rng)
    observe = by_request(acceptance, 1)
    simulate(observe, 0.7, 4, 100, rng)
    for _ in range(100):
        simulate(observe, 0.7, 4, 1, rng)
        far += (acceptance.of_places(1, "d", 1)[1][0] - 0.7) ** 2 / 100
    assert far**0.5 < 0.1  # ten rounds alone scatter by 0.14


def test_requests_of_one_batch_are_told_apart() -> None:
    """In turns one request is always right and one never: each keeps its own shift from the rates of their slice."""
    acceptance, rng = Acceptance(), random.Random(6)
    good, bad = by_request(acceptance, 0), by_request(acceptance, 1)
    for _ in range(60):
        simulate(good, 0.9, 4, 1, rng)
        simulate(bad, 0.05, 4, 1, rng)
    assert acceptance.of_places(0, "d", 1)[1][0] > 0.6
    assert acceptance.of_places(1, "d", 1)[1][0] < 0.2


def test_what_all_requests_show_fades_with_new_rounds_only() -> None:
    rates, rng = PlaceRates(), random.Random(3)
    simulate(by_place(rates), 0.9, 4, 200, rng)
    assert emitted_of(rates, 1)[0] > 0.6
    simulate(by_place(rates), 0.0, 4, 100, rng)
    assert emitted_of(rates, 1)[0] < 0.2


def test_a_new_request_begins_where_its_slice_is() -> None:
    """And a slice that was not seen where all texts are."""
    acceptance = Acceptance()
    simulate(by_request(acceptance, 0, "poems"), 0.05, 4, 100, random.Random(4))
    observe = by_request(acceptance, 1, "poems")
    acceptance.begin(2, "")
    assert acceptance.of_places(1, "d", 2)[1][0] < 0.25
    assert acceptance.of_places(1, "d", 2)[1][0] == pytest.approx(acceptance.of_places(2, "d", 2)[1][0], abs=0.1)
    simulate(by_request(acceptance, 3, "code"), 0.95, 4, 100, random.Random(4))
    acceptance.begin(4, "poems")
    assert acceptance.of_places(4, "d", 2)[1][0] < 0.25 < 0.5 < acceptance.of_places(3, "d", 2)[1][0]
    for _ in range(15):
        observe(2, [1.0, 1.0])
    emitted = acceptance.of_places(1, "d", 6)[1]
    assert emitted[0] > 0.7
    assert list(emitted) == sorted(emitted, reverse=True)


def test_a_finished_request_is_forgotten_and_slices_are_bounded() -> None:
    acceptance = Acceptance()
    for number in range(1000):
        by_request(acceptance, number, f"slice {number}")(1, [1.0])
        acceptance.finish(number)
    assert not acceptance._requests
    assert len(acceptance._slices) <= 256


@pytest.mark.parametrize(("first", "later"), [(0.02, 0.5), (0.5, 0.97), (0.97, 0.99)])
def test_a_request_learns_how_often_the_draft_tokens_shown_are_right(first: float, later: float) -> None:
    """A drafter that always says 0.7: within thirty rounds the chances are the true ones, first draft tokens and later
    ones apart.
    """
    rng, acceptance, preview = random.Random(1), Acceptance(), chain(0.7, 0.7, 0.7)
    acceptance.begin(0, "")
    for _ in range(30):
        right = [rng.random() < first, rng.random() < later, rng.random() < later]
        found: list[bool | None] = [
            right[0],
            right[1] if right[0] else None,
            right[2] if right[0] and right[1] else None,
        ]
        acceptance.observe_preview(0, "d", preview, found)
    emitted = acceptance.of_preview(0, "d", preview)
    assert emitted[0] == pytest.approx(first, abs=0.17)
    if first > 0.1:
        assert emitted[1] / emitted[0] == pytest.approx(later, abs=0.17)


def test_draft_tokens_shown_to_a_new_request_are_as_good_as_those_of_its_slice() -> None:
    acceptance, preview = Acceptance(), chain(0.8)
    acceptance.begin(0, "poems")
    before = acceptance.of_preview(0, "d", preview)[0]
    for _ in range(200):
        acceptance.observe_preview(0, "d", preview, [False])
    acceptance.begin(1, "poems")
    assert acceptance.of_preview(1, "d", preview)[0] < 0.1 < before
    for _ in range(40):
        acceptance.observe_preview(1, "d", preview, [True])
    assert acceptance.of_preview(1, "d", preview)[0] > 0.65  # its own rounds outweigh the slice's


def test_classes_learn_what_a_named_chance_means() -> None:
    """Over all requests: 0.9 stands half of the time, 0.3 always."""
    classes, rng = ChanceRates(), random.Random(2)
    for _ in range(600):
        classes.observe(chain(0.9), [rng.random() < 0.5])
        classes.observe(chain(0.3), [True])
    assert classes.rates(chain(0.9))[0] == pytest.approx(0.5, abs=0.1)
    assert classes.rates(chain(0.3))[0] > 0.9
