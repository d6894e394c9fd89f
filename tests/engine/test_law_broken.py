"""How little the tests of the distribution see, and that they see rules and drafters which are broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import SpecConfig
from foretoken.core import Draft, Uniforms, Verdict
from foretoken.draft import branches, cascade
from foretoken.text.processors import RequestProcessors
from foretoken.text.randomness import Purpose, round_uniforms, uniforms
from foretoken.verify.base import verdict_at
from foretoken.verify.rejection import RejectionRule
from tests.engine.test_law import BASE, NUM_REQUESTS, model_specs, narrow, seeded
from tests.helpers.distribution import (
    ALARM,
    TWO_LEVELS,
    exact_law,
    p_values,
    power,
    sample_answers,
)

__all__ = ["narrow"]  # a fixture
NUM_BROKEN = 1600


def test_the_power_of_these_tests() -> None:
    """800 requests see a distribution of two neighbouring tokens that is off by 0.17 in total variation with
    probability > 0.99, and 1600, as those of broken rules and in the mixed batches of proof/test_law.py, one that is
    off by 0.12.

    The broken rules below are off by 0.14 to 0.49. False alarms: at 1e-5 a window, about 110 windows: one set of seeds
    in 900; the seeds are fixed.
    """
    assert power(0.17, NUM_REQUESTS) > 0.99
    assert power(0.12, NUM_BROKEN) > 0.99


def _whole_law_as_mass(patch: pytest.MonkeyPatch) -> None:
    def drawn(draws: Sequence[branches._Draw], distributions: torch.Tensor) -> None:
        draw(draws, distributions)
        for one in draws:
            one.growth.masses[one.growth.parents[one.node]] = distributions[one.row]

    draw = branches._draw
    patch.setattr(branches, "_draw", drawn)


def check_trees_of_another_mass_are_seen(narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's whole distribution in place of what the deterministic draft tokens left of it."""
    _whole_law_as_mass(monkeypatch)
    spec = SpecConfig("draft_model", "reverse", num_draft=8, rule="tree", tree="best_first", branching=(2, 2, 2))
    asked = [(params, spec) for params in seeded(BASE, NUM_BROKEN)]
    assert min(p_values(sample_answers(narrow, asked), exact_law(narrow, BASE))) < ALARM / 1000


def _residual_is_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RejectionRule, "next_token_weights", lambda self, draft, probs, rows: probs[list(rows)])


def _test_with_q(patch: pytest.MonkeyPatch) -> None:
    terms = RejectionRule.accept_terms
    patch.setattr(RejectionRule, "accept_terms", lambda self, draft, probs: (terms(self, draft, probs)[1],) * 2)


def _cascade_without_a_middle(patch: pytest.MonkeyPatch) -> None:
    """Every inner draft token is kept: tokens of the first level under the distribution of the second."""
    judge = cascade._judge

    def keep_all(runs: Sequence[object], draft: Draft, probs: torch.Tensor) -> Verdict:
        verdict = judge(runs, draft, probs)
        rows = [draft.anchor_row(b) + draft.lengths[b] for b in range(draft.num_requests)]
        return verdict_at(draft, draft.tokens.tolist(), rows, verdict.next_tokens, None)

    patch.setattr(cascade, "_judge", keep_all)


def _reuse_the_draft_uniform(patch: pytest.MonkeyPatch) -> None:
    def reused(draft: Draft, seeds: Sequence[int], starts: Sequence[int], device: torch.device) -> Uniforms:
        owner = [b for b, length in enumerate(draft.lengths) for _ in range(length)]
        places = [node for length in draft.lengths for node in range(length)]
        numbers = uniforms([seeds[b] for b in owner], Purpose.DRAFT, [starts[b] for b in owner], places)
        return Uniforms(torch.from_numpy(numbers), round_uniforms(draft, seeds, starts, device).next)

    patch.setattr("foretoken.engine.runner.round_uniforms", reused)


BREAKAGES = {one.__name__: one for one in (_residual_is_target, _test_with_q, _reuse_the_draft_uniform)}


@pytest.mark.repeated
def test_the_same_test_fails_for_a_broken_rule(narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of `BREAKAGES`: proof/test_law.py; of rules alone: tests/verify/test_broken_variants.py."""
    check_breakage_is_seen(narrow, _reuse_the_draft_uniform, monkeypatch)


def check_breakage_is_seen(
    narrow: SimpleNamespace, breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken rule changes the distribution by more than the tests can miss."""
    breakage(monkeypatch)
    asked = list(zip(seeded(BASE, NUM_BROKEN), model_specs("rejection", NUM_BROKEN), strict=True))
    assert min(p_values(sample_answers(narrow, asked), exact_law(narrow, BASE))) < ALARM / 1000


def check_a_cascade_that_does_not_verify_is_seen(narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the first level under the distribution of the second."""
    _cascade_without_a_middle(monkeypatch)
    specs = [replace(TWO_LEVELS, num_draft=4, rule="rejection")] * NUM_BROKEN
    answers = sample_answers(narrow, list(zip(seeded(BASE, NUM_BROKEN), specs, strict=True)))
    assert min(p_values(answers, exact_law(narrow, BASE))) < ALARM / 1000


@pytest.mark.repeated
def test_a_penalty_that_is_stale_inside_the_block_is_seen(
    narrow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other penalty: proof/test_law.py."""
    check_a_stale_penalty_is_seen(narrow, {"frequency_penalty": 1.5}, monkeypatch)


def check_a_stale_penalty_is_seen(
    narrow: SimpleNamespace, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One penalty vector for the whole block: a bug that engines have shipped."""
    adjust = RequestProcessors.adjust
    monkeypatch.setattr(
        RequestProcessors,
        "adjust",
        lambda self, logits, paths, is_draft=False: adjust(self, logits, [()] * len(paths), is_draft),
    )
    params = replace(BASE, **values)
    asked = list(zip(seeded(params, NUM_BROKEN), model_specs("block", NUM_BROKEN), strict=True))
    assert min(p_values(sample_answers(narrow, asked), exact_law(narrow, params))) < ALARM / 1000
