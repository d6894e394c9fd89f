"""Sampled answers follow the exact distribution when every drafter, rule and sampling parameter shares each batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engine.test_law import (
    BASE,
    groups_answers,
    head_answers,
    narrow,
    parameter_answers,
    parameter_law,
)
from tests.helpers.distribution import ALARM, exact_law, p_values

__all__ = ["narrow"]  # a fixture
NUM_REQUESTS = 1600  # of each group


def test_every_rule_has_the_law_in_mixed_batches(narrow: SimpleNamespace) -> None:
    """All rules, all drafters and plain: each group by itself is seen when it is off by 0.12 (the test of the power in
    tests/engine/test_law.py).
    """
    distribution = exact_law(narrow, BASE)
    for name, answers in groups_answers(narrow, NUM_REQUESTS).items():
        assert min(p_values(answers, distribution)) > ALARM, name


def test_every_sampling_parameter_has_the_law_in_mixed_batches(narrow: SimpleNamespace) -> None:
    for name, answers in parameter_answers(narrow, NUM_REQUESTS).items():
        assert min(p_values(answers, parameter_law(narrow, name))) > ALARM, name


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_every_trained_head_has_the_law_at_other_temperatures(narrow: SimpleNamespace, temperature: float) -> None:
    """Chains and trees of each head by itself, all heads in each batch."""
    distribution = exact_law(narrow, replace(BASE, temperature=temperature))
    for name, answers in head_answers(narrow, temperature, NUM_REQUESTS).items():
        assert min(p_values(answers, distribution)) > ALARM, name
