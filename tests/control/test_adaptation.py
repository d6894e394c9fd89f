"""The share of the machine that learning takes, and the gate that new weights pass."""

from __future__ import annotations

import math
import random

import pytest

from foretoken.control.adaptation import MIN_WINDOWS, AdaptConfig, ShareBudget, change, emitted_per_step
from foretoken.errors import InputError


@pytest.mark.parametrize("share", [0.05, 0.25, 0.9])
@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_the_share_is_kept_over_every_stretch_of_time(share: float, num_cores: int) -> None:
    rng, now_s = random.Random(1), 5.0
    budget = ShareBudget(share, num_cores, now_s)
    events = [(now_s, 0.0)]
    for _ in range(400):
        spent_s = rng.choice((0.001, 0.01, 0.08))
        now_s += spent_s * rng.uniform(1, 4)  # a niced thread waits for a core
        if rng.random() < 0.02:
            now_s += 300  # nothing to learn for a while
        events.append((now_s, spent_s))
        now_s += budget.pause_s(now_s, spent_s)
    rate, max_saved_s = min(1.0, share * num_cores), 0.2
    for first in range(0, len(events), 7):
        for last in range(first + 1, len(events), 11):
            spent_s = sum(spent for _, spent in events[first + 1 : last + 1])
            assert spent_s <= rate * (events[last][0] - events[first][0]) + max_saved_s + 0.08 + 1e-9


def test_the_share_is_used() -> None:
    budget, now_s, spent_s = ShareBudget(0.2, 2, 0.0), 0.0, 0.0
    while now_s < 100:
        now_s, spent_s = now_s + 0.02, spent_s + 0.01
        now_s += budget.pause_s(now_s, 0.01)
    assert spent_s == pytest.approx(0.4 * now_s, rel=0.02)


BASE = [2.0, 2.5, 1.5, 3.0, 2.2, 1.9, 2.4, 2.1]


def test_a_clear_change_rises_or_falls() -> None:
    better = [score + step for score, step in zip(BASE, [0.2, 0.1, 0.15, 0.3, 0.1, 0.2, 0.05, 0.2], strict=True)]
    assert change(BASE, better).rises
    assert not change(BASE, better).falls
    assert change(better, BASE).falls
    assert not change(better, BASE).rises


def test_a_change_within_its_error_is_none() -> None:
    noisy = [score + step for score, step in zip(BASE, [0.5, -0.5, 0.4, -0.4, 0.5, -0.3, 0.1, -0.2], strict=True)]
    found = change(BASE, noisy)
    assert not found.rises
    assert not found.falls
    assert not change(BASE, BASE).rises
    assert not change(BASE, BASE).falls


def test_few_windows_decide_nothing() -> None:
    few = BASE[: MIN_WINDOWS - 1]
    assert not change(few, [score + 1 for score in few]).rises
    assert not change(few, [score - 1 for score in few]).falls
    assert not change([], []).rises
    assert not change([], []).falls


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_never_pass(bad: float) -> None:
    broken = [*[score + 1 for score in BASE[1:]], bad]
    assert not change(BASE, broken).rises
    assert change(BASE, broken).falls


def test_emitted_per_step() -> None:
    assert emitted_per_step([]) == 1.0
    assert emitted_per_step([0.5, 0.5, 1.0]) == 1.0 + 0.5 + 0.25 + 0.25


@pytest.mark.parametrize(
    ("field", "value"),
    [("share", 1.5), ("share", 0.0), ("share", math.nan), ("buffer_tokens", 10), ("swap_interval_s", -1.0)],
)
def test_the_config_refuses_by_name(field: str, value: float) -> None:
    with pytest.raises(InputError, match=field):
        AdaptConfig(**{field: value})
