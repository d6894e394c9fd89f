"""The policy against every fixed choice over chances, prices and sizes of batch."""

from __future__ import annotations

import itertools

import pytest

from tests.control import test_drafter_options as drafter_options
from tests.control import test_policy as policy
from tests.helpers.usual import some_of

# Every chance, and every text at two prices, in batches of every size.
USUAL_CHANCES = {(*chance, batch) for chance, batch in zip(policy.CHANCES, (1, 4, 1, 4, 16, 1, 4), strict=True)}
USUAL_TEXTS = {
    *(("copies", 0.02, 4), ("copies", 0.5, 16), ("new text", 0.1, 1), ("new text", 0.5, 4), ("both", 0.02, 1)),
    *(("both", 0.1, 4), ("nothing", 0.02, 4), ("nothing", 0.5, 1), ("half", 0.1, 1), ("half", 0.5, 4)),
}


@pytest.mark.parametrize(
    ("chance", "price_s", "batch"),
    some_of(
        [(*chance, batch) for chance, batch in itertools.product(policy.CHANCES, policy.BATCHES)],
        USUAL_CHANCES,
        pytest.mark.release,
    ),
)
def test_near_the_best_fixed_number_and_never_much_below_plain(chance: float, price_s: float, batch: int) -> None:
    policy.check_speed(batch, chance, price_s)


@pytest.mark.parametrize(
    ("name", "price_s", "batch"),
    some_of(
        itertools.product(drafter_options.CASES, drafter_options.PRICES_S, drafter_options.BATCHES),
        USUAL_TEXTS,
        pytest.mark.release,
    ),
)
def test_as_good_as_the_best_fixed_drafter_and_number(name: str, price_s: float, batch: int) -> None:
    drafter_options.check_speed(name, price_s, batch)
