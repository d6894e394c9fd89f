"""Sampled answers follow the exact distribution: every drafter, rule and sampling parameter by itself, and all of them
sharing each batch; and broken ones are seen.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.draft import test_other_vocabulary as other_vocabulary
from tests.engine.test_law import (
    BASE,
    GROUPS_HERE,
    PARAMETERS,
    PARAMETERS_HERE,
    check_group,
    check_parameter,
    groups,
    groups_answers,
    head_answers,
    narrow,
    parameter_answers,
    parameter_law,
)
from tests.engine.test_law_broken import (
    BREAKAGES,
    check_a_cascade_that_does_not_verify_is_seen,
    check_a_stale_penalty_is_seen,
    check_breakage_is_seen,
    check_trees_of_another_mass_are_seen,
)
from tests.helpers.distribution import ALARM, exact_law, p_values

__all__ = ["narrow"]  # a fixture
# Of each group: one that is off by 0.17 is seen, before a release one that is off by 0.12, and all of them together
# when they are off alike by a quarter of that (the test of the power in tests/engine/test_law_broken.py).
NUM_REQUESTS = [800, pytest.param(1600, marks=pytest.mark.release)]


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_every_rule_has_the_law_in_mixed_batches(narrow: SimpleNamespace, num_requests: int) -> None:
    """All rules, all drafters and plain, each group by itself and all of them together."""
    distribution, found = exact_law(narrow, BASE), groups_answers(narrow, num_requests)
    for name, answers in found.items():
        assert min(p_values(answers, distribution)) > ALARM, name
    assert min(p_values(np.concatenate(list(found.values())), distribution)) > ALARM


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_every_sampling_parameter_has_the_law_in_mixed_batches(narrow: SimpleNamespace, num_requests: int) -> None:
    for name, answers in parameter_answers(narrow, num_requests).items():
        assert min(p_values(answers, parameter_law(narrow, name))) > ALARM, name


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_every_trained_head_has_the_law_at_other_temperatures(
    narrow: SimpleNamespace, temperature: float, num_requests: int
) -> None:
    """Chains and trees of each head by itself, all heads in each batch."""
    distribution = exact_law(narrow, replace(BASE, temperature=temperature))
    for name, answers in head_answers(narrow, temperature, num_requests).items():
        assert min(p_values(answers, distribution)) > ALARM, name


# Each of these has as many answers in the mixed batches above; tests/engine/test_law.py has the others by themselves.
@pytest.mark.release
@pytest.mark.parametrize("name", [name for name in groups(0) if name not in GROUPS_HERE])
def test_every_drafter_has_the_law(narrow: SimpleNamespace, name: str) -> None:
    check_group(narrow, name)


@pytest.mark.release
@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in PARAMETERS_HERE])
def test_every_sampling_parameter_has_the_law(narrow: SimpleNamespace, name: str) -> None:
    check_parameter(narrow, name)


@pytest.mark.parametrize("name", ["_residual_is_target", "_test_with_q"])
def test_a_broken_rule_is_seen(narrow: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_breakage_is_seen(narrow, BREAKAGES[name], monkeypatch)


def test_trees_of_another_mass_than_they_were_drawn_from_are_seen(
    narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trees_of_another_mass_are_seen(narrow, monkeypatch)


def test_a_cascade_that_does_not_verify_is_seen(narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_cascade_that_does_not_verify_is_seen(narrow, monkeypatch)


def test_a_stale_penalty_is_seen(narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_stale_penalty_is_seen(narrow, {"presence_penalty": 2.0}, monkeypatch)


def test_drafts_of_another_vocabulary_have_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed_drafters: list[str]
) -> None:
    other_vocabulary.check_laws(tmp_path, monkeypatch, failed_drafters, other_vocabulary.LAWS)
