"""How many guesses pay: against trying every number, and where the costs rise in steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.plan.rows import StepTable, admits, best_budget, free_rows


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.booleans())
def test_the_best_budget_has_the_most_tokens_per_second(seed: int, stepped: bool) -> None:
    rng = np.random.default_rng(seed)
    survivals = sorted(rng.random(12) ** 2, reverse=True)
    others, draft_s = int(rng.integers(0, 6)), float(rng.choice([0.0, 0.02]))
    costs = np.cumsum(rng.random(20) * (rng.random(20) > 0.5 if stepped else 0.2)) + 1
    speed = [(1 + sum(survivals[:n])) / (costs[others + n] + n * draft_s) for n in range(13)]
    chosen = best_budget(survivals, lambda rows: costs[rows - 1], draft_s, others)
    assert speed[chosen] == pytest.approx(max(speed))
    assert chosen == 0 or speed[chosen] > max(speed[:chosen])


def test_equal_rows_are_admitted_one_by_one() -> None:
    """With a constant cost per row the ratio rule, guess by guess, finds the best number."""
    survivals = [0.9, 0.7, 0.5, 0.3, 0.2, 0.1]
    tokens, cost, count = 1.0, 1.0, 0
    while count < len(survivals) and admits(survivals[count], 0.15, tokens, cost):
        tokens, cost, count = tokens + survivals[count], cost + 0.15, count + 1
    assert count == best_budget(survivals, lambda rows: 0.85 + 0.15 * rows) == 3


def test_a_guess_that_shares_a_step_pays() -> None:
    """Rows come in pairs: the first of a pair alone would not pay."""
    stairs = lambda rows: 1.0 + 0.5 * (rows // 2)  # noqa: E731
    assert best_budget([0.4, 0.4], stairs) == 2
    assert best_budget([0.4], stairs) == 0


def test_nothing_pays_when_rows_cost_what_they_cost() -> None:
    assert best_budget([0.9, 0.9], lambda rows: float(rows)) == 0
    assert best_budget([], lambda rows: 1.0) == 0
    assert best_budget([0.01] * 50, lambda rows: 1.0) == 50
    assert best_budget([0.6, 0.6], lambda rows: 1.0, draft_s_per_node=0.7) == 0


def test_a_table_of_measurements() -> None:
    table = StepTable({1: 1.0, 4: 1.1, 2: 1.2, 8: 2.4})
    assert [table(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1.0, 1.2, 1.2, 1.2])  # a measurement that fell counts as noise
    assert table(6) == pytest.approx(1.8)
    assert table(10) == pytest.approx(3.0)
    assert StepTable({3: 2.0})(9) == 2.0
    assert StepTable({2: 2.0, 3: 2.5})(1) == 2.0
    assert (table.free_rows(0.1), table.free_rows(), table.free_rows(2.0)) == (1, 4, 8)


def test_free_rows_of_a_machine() -> None:
    assert free_rows(312e12, 2.0e12, 2) == pytest.approx(156)  # an A100 with 16-bit weights
