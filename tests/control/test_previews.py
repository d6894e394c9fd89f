"""Guesses that are ready beforehand: judged by what was emitted, corrected by how often they were right."""

from __future__ import annotations

import random

import pytest

from foretoken.control.previews import ChanceClasses, Preview, PreviewCalibration, PreviewThrottle, outcomes


def chain(*steps: float) -> Preview:
    chances, product = [], 1.0
    for step in steps:
        product *= step
        chances.append(product)
    return Preview(tuple(range(-1, len(steps) - 1)), tuple(chances))


def test_a_guess_is_judged_only_where_the_text_came_to_it() -> None:
    """Two branches of two: the emitted text takes the second and ends behind it."""
    look = Preview((-1, 0, -1, 2, 3), (0.5, 0.4, 0.3, 0.2, 0.1))
    assert outcomes(look, (7, 8, 9, 4, 5), (9, 4)) == [False, None, True, True, None]
    assert outcomes(look, (7, 8, 9, 4, 5), (9, 6)) == [False, None, True, False, None]
    assert outcomes(look, (7, 8, 9, 4, 5), ()) == [None] * 5


def test_steps_are_chances_given_the_guess_before() -> None:
    assert chain(0.5, 0.8, 0.9).steps == pytest.approx((0.5, 0.8, 0.9))


@pytest.mark.parametrize(("first", "later"), [(0.02, 0.5), (0.5, 0.97), (0.97, 0.99)])
def test_a_request_learns_how_often_its_guesses_are_right(first: float, later: float) -> None:
    """A drafter that always says 0.7: within thirty rounds the chances are the true ones, first guesses and later ones
    apart.
    """
    rng, calibration, look = random.Random(1), PreviewCalibration(ChanceClasses()), chain(0.7, 0.7, 0.7)
    for _ in range(30):
        right = [rng.random() < first, rng.random() < later, rng.random() < later]
        found: list[bool | None] = [
            right[0],
            right[1] if right[0] else None,
            right[2] if right[0] and right[1] else None,
        ]
        calibration.observe(look, found)
    assert calibration.chances(look)[0] == pytest.approx(first, abs=0.17)
    if first > 0.1:
        assert calibration.chances(look)[1] / calibration.chances(look)[0] == pytest.approx(later, abs=0.17)


def test_a_new_request_begins_where_others_of_its_kind_are() -> None:
    classes, look = ChanceClasses(), chain(0.8)
    kind = PreviewCalibration(classes, slow=True)
    before = PreviewCalibration(classes, kind).chances(look)[0]
    for _ in range(200):
        kind.observe(look, [False])
    assert PreviewCalibration(classes, kind).chances(look)[0] < 0.1 < before
    good = PreviewCalibration(classes, kind)
    for _ in range(40):
        good.observe(look, [True])
    assert good.chances(look)[0] > 0.8  # its own rounds outweigh the kind's


def test_classes_learn_what_a_named_chance_means() -> None:
    """Over all requests: 0.9 stands half of the time, 0.3 always."""
    classes, rng = ChanceClasses(), random.Random(2)
    for _ in range(600):
        classes.observe(chain(0.9), [rng.random() < 0.5])
        classes.observe(chain(0.3), [True])
    assert classes.rates(chain(0.9))[0] == pytest.approx(0.5, abs=0.1)
    assert classes.rates(chain(0.3))[0] > 0.9


def test_looking_stops_where_it_takes_more_than_it_brings_and_begins_again() -> None:
    sight, opened = PreviewThrottle(), 0
    for _ in range(200):
        if sight.opens(token_s=1.0):
            sight.took(0.2)
            sight.brought(0)
            opened += 1
    assert opened < 40
    for _ in range(16):
        if sight.opens(1.0):
            sight.brought(3)
    assert all(sight.opens(1.0) for _ in range(3))


def test_looking_at_next_to_no_cost_goes_on() -> None:
    sight = PreviewThrottle()
    for _ in range(50):
        assert sight.opens(token_s=1.0)
        sight.took(0.001)
        sight.brought(0)
