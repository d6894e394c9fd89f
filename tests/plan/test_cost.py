"""What a cost table says between, beyond and before its measurements."""

from __future__ import annotations

import pytest

from foretoken.plan.cost import CostTable


def test_measured_between_beyond_and_before() -> None:
    table = CostTable()
    assert table.is_empty
    assert table.seconds(5) == 0.0
    table.observe(4, 2.0)
    table.observe(8, 3.0)
    assert table.seconds(4) == 2.0
    assert table.seconds(5) == 2.25
    assert 3.0 < table.seconds(9) < 3.2
    assert 1.8 < table.seconds(1) < 2.0
    assert table.as_dict() == {4: 2.0, 8: 3.0}


def test_averages_forget_and_outliers_count_little() -> None:
    table = CostTable()
    for _ in range(20):
        table.observe(1, 1.0)
    table.observe(1, 1000.0)
    assert table.seconds(1) < 1.2
    for _ in range(60):
        table.observe(1, 2.0)
    assert table.seconds(1) == pytest.approx(2.0, rel=0.01)


def test_large_counts_share_buckets() -> None:
    table = CostTable()
    for count in range(1, 2000):
        table.observe(count, float(count))
    assert len(table.as_dict()) < 90
    for count in (17, 100, 777, 1999):
        assert table.seconds(count) == pytest.approx(count, rel=0.08)
    assert list(table.as_dict()) == sorted(table.as_dict())
