"""Every rounding of logits lies between the bounds, over every filter, step and temperature; the tests take some."""

from __future__ import annotations

import pytest

from tests.text.test_support import FILTERS, check_bounds


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("step", "temperature"), [(1e-6, 1.5), (0.0625, 0.05)])
def test_every_rounding_lies_between_the_bounds(filters: dict[str, float], step: float, temperature: float) -> None:
    check_bounds(filters, step, temperature)
