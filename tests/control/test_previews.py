"""Draft tokens that are shown beforehand: judged by what was emitted, cut to a budget."""

from __future__ import annotations

import pytest

from foretoken.control.candidates import Preview

TREE = Preview((-1, 0, -1, 2, 3), (0.5, 0.4, 0.3, 0.2, 0.1), (7, 8, 9, 4, 5))


def test_a_draft_token_is_judged_only_where_the_text_came_to_it() -> None:
    """Two branches of two: the emitted text takes the second and ends behind it."""
    assert TREE.outcomes((9, 4)) == [False, None, True, True, None]
    assert TREE.outcomes((9, 6)) == [False, None, True, False, None]
    assert TREE.outcomes(()) == [None] * 5


def test_steps_are_chances_given_the_draft_token_before() -> None:
    assert TREE.steps == pytest.approx((0.5, 0.8, 0.3, 2 / 3, 0.5))


def test_a_smaller_budget_is_given_the_first_draft_tokens() -> None:
    assert TREE.first(3) == Preview((-1, 0, -1), (0.5, 0.4, 0.3), (7, 8, 9))
    assert TREE.first(5) == TREE.first(9) == TREE
    assert TREE.first(0) == Preview()
