"""Counts of rounds: chains, short drafts, trees; and the rows made of them."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.measure.eval.counts import AnswerCounts
from foretoken.measure.eval.result import EvalResult, EvalSample, expected_interval, rows_of
from foretoken.measure.stats import ratio_interval


def test_a_position_is_reached_behind_the_accepted_tokens_only() -> None:
    counts = AnswerCounts()
    counts.count([-1, 0, 1], [0])  # a chain of three, one accepted
    counts.count([-1, 0], [0, 1])  # shorter, accepted whole
    counts.count([], [])  # nothing drafted
    assert counts == AnswerCounts(
        num_rounds=3, num_drafts=2, num_drafted=5, num_accepted=3, num_emitted=6, reached=[2, 2], passed=[2, 1]
    )


def test_a_tree_passes_a_position_once() -> None:
    counts = AnswerCounts()
    counts.count([-1, -1, 1, 1], [1, 3])  # two first tokens, the second with two children
    counts.count([-1, -1, 1, 1], [0])  # the accepted one has no child: nothing was reached behind it
    assert (counts.reached, counts.passed, counts.num_drafted, counts.num_accepted) == ([2, 1], [2, 1], 8, 3)


def test_what_follows_from_the_chances_for_a_fixed_length() -> None:
    counts = AnswerCounts(4, 4, 10, 5, 9, reached=[4, 3, 2], passed=[3, 2, 0])
    sample = EvalSample("ngram-3", "code", 0.0, "p", "greedy", counts)
    (row,) = rows_of(EvalResult([sample], {}, {}, {}, "", {}, {}, ""))
    expected = [one["expected"] for one in row["accepted_at_length"]]
    assert expected == pytest.approx([3 / 4, 3 / 4 + 1 / 2, 3 / 4 + 1 / 2])
    assert [one["interval"] for one in row["accepted_at_length"]] == [None, None, None]
    assert (row["acceptance_rate"], row["accepted_per_draft"], row["emitted_per_step"]) == (0.5, 1.25, 2.25)
    assert row["acceptance_interval"] is None  # of one prompt
    assert [one["num_reached"] for one in row["positions"]] == [4, 3, 2]


def test_the_interval_of_what_is_expected_of_several_positions() -> None:
    """With one position it is that of the rate; prompts that are alike leave nothing open."""
    generator = np.random.default_rng(5)
    counts = np.stack([generator.binomial(40, 0.6, size=8), np.full(8, 40)], axis=1).astype(float)
    assert expected_interval([counts]) == ratio_interval(counts)
    alike = [np.array([[8.0, 10.0]] * 6), np.array([[4.0, 8.0]] * 6)]
    found = expected_interval(alike)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))
    assert expected_interval([counts[:1]]) is None
