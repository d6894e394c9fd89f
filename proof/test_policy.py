"""The policy against every fixed choice over every chance, price and size of batch; the tests take some."""

from __future__ import annotations

import pytest

from tests.control import test_drafter_options as drafter_options
from tests.control import test_policy as policy


@pytest.mark.parametrize("batch", policy.BATCHES)
@pytest.mark.parametrize(("chance", "price_s"), policy.CHANCES)
def test_near_the_best_fixed_number_and_never_much_below_plain(batch: int, chance: float, price_s: float) -> None:
    policy.check_speed(batch, chance, price_s)


@pytest.mark.parametrize("batch", drafter_options.BATCHES)
@pytest.mark.parametrize("price_s", drafter_options.PRICES_S)
@pytest.mark.parametrize("name", drafter_options.CASES)
def test_as_good_as_the_best_fixed_drafter_and_number(name: str, price_s: float, batch: int) -> None:
    drafter_options.check_speed(name, price_s, batch)
