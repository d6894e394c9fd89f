"""The enumeration sees bugs in block, tree and traversal: each known mistake is planted, and the distribution error
must be large.

Every variant states the least error it must show on fixed distributions (about two thirds of what it is), far above
EXACT.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import Draft, Mass
from foretoken.transfer import to_host
from foretoken.verify import RULES, Rule, block, siblings
from foretoken.verify.base import node_terms, residual_weights
from foretoken.verify.block import BlockRule
from foretoken.verify.siblings import Residuals
from tests.helpers.enumeration import (
    EXACT,
    Drafter,
    RandomTables,
    Tables,
    cases_of,
    complete,
    emitted_law,
    joint,
    max_error,
)
from tests.verify.drafters import chain_drafter, row, tree_drafter

VOCAB, LENGTH = 3, 3
TARGET, DRAFT = RandomTables(VOCAB, seed=21), RandomTables(VOCAB, seed=22)
MODEL, DROPPED, COIN = (chain_drafter(kind, LENGTH, DRAFT, 3) for kind in ("model", "dropped", "coin"))


def error(rule: Rule, drafter: Drafter, target: Tables = TARGET, length: int = LENGTH + 1) -> float:
    distribution = emitted_law(rule, cases_of(drafter, {(): 1.0}), target)
    return max_error(complete(distribution, target, length), joint(target, length))


# ---- block


class BreakAtFirstFailure(BlockRule):
    """Goes on only while the tests pass, in place of looking for the longest prefix that passes."""

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        p, mu = to_host(*node_terms(draft, target_probs))
        bounds = block._bounds(draft, target_probs, p, block._reach(draft, p, mu))
        return torch.tensor([bounds[r] for r in siblings.node_rows(draft)], dtype=target_probs.dtype)


class ResidualWithoutReach(BlockRule):
    """(p - mu)_+ in place of (P p - mu)_+."""

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return residual_weights(draft, target_probs, rows)


class PlainEnd(BlockRule):
    """A row where a token could have been proposed, but was not, treated as the end of a draft of fixed length."""

    def accept_probabilities(self, draft: Draft, target_probs: Tensor) -> Tensor:
        return super().accept_probabilities(_without_missing(draft), target_probs)

    def next_token_weights(self, draft: Draft, target_probs: Tensor, rows: Sequence[int]) -> Tensor:
        return super().next_token_weights(_without_missing(draft), target_probs, rows)


def _without_missing(draft: Draft) -> Draft:
    assert draft.mass is not None
    with_child = set(draft.parent_rows)
    distributions = tuple(
        distribution if r in with_child else -1 for r, distribution in enumerate(draft.mass.distribution_of_row)
    )
    return replace(draft, mass=Mass(draft.mass.distributions, distributions))


@pytest.mark.parametrize(
    ("broken", "drafter", "least"),
    [
        (BreakAtFirstFailure(), MODEL, 0.047),
        (ResidualWithoutReach(), MODEL, 0.0055),
        (PlainEnd(), DROPPED, 0.037),
        (PlainEnd(), COIN, 0.014),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_broken_block_shows(broken: Rule, drafter: Drafter, least: float) -> None:
    assert error(RULES["block"], drafter) < EXACT
    assert error(broken, drafter) > least


def _bound_is_reach(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "_bounds", lambda draft, probs, p, reach: list(reach))


def _reach_is_not_capped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "accept_ratio", lambda weight, mass: weight / mass if mass else 0.0)


def _reach_forgets_the_prefix(patch: pytest.MonkeyPatch) -> None:
    def reach(draft: Draft, p: Sequence[float], mu: Sequence[float]) -> list[float]:
        found = [1.0] * draft.num_rows
        for node, r in enumerate(siblings.node_rows(draft)):
            found[r] = min(1.0, p[node] / mu[node])
        return found

    patch.setattr(block, "_reach", reach)


def _one_in_place_of_one_minus_reach(patch: pytest.MonkeyPatch) -> None:
    bounds = block._bounds

    def broken(draft: Draft, probs: Tensor, p: Sequence[float], reach: Sequence[float]) -> list[float]:
        right = bounds(draft, probs, p, reach)
        left = [h * (1 - r) / (1 - h) if h < 1 else r for h, r in zip(right, reach, strict=True)]
        return [
            z / (z + 1) if row not in {draft.anchor_row(b) for b in range(draft.num_requests)} else 1.0
            for row, z in enumerate(left)
        ]

    patch.setattr(block, "_bounds", broken)


@pytest.mark.parametrize(
    ("breakage", "least"),
    [
        (_bound_is_reach, 0.032),
        (_reach_is_not_capped, 0.018),
        (_reach_forgets_the_prefix, 0.048),
        (_one_in_place_of_one_minus_reach, 0.024),
    ],
)
def test_a_broken_formula_of_block_shows(
    breakage: Callable[[pytest.MonkeyPatch], None], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    breakage(monkeypatch)
    assert error(RULES["block"], MODEL) > least


# ---- trees


TREE_VOCAB, DEPTH = 3, 2
TREE_TARGET, TREE_LAWS = RandomTables(TREE_VOCAB, seed=51), RandomTables(TREE_VOCAB, seed=52)
SIBLINGS, THREE, PLUS_ONE, THINNED, FIXED, TWO_AND_ONE = (
    tree_drafter(kind, DEPTH, TREE_LAWS, 53)
    for kind in ("siblings", "three", "plus_one", "thinned", "fixed", "two_and_one")
)


def _residual_not_updated(patch: pytest.MonkeyPatch) -> None:
    """Every sibling is tested against p; only the last one is taken off at the end."""

    def refuse(self: Residuals, rows: Sequence[int]) -> None:
        for r in rows:
            self.num_refused[r] += 1

    patch.setattr(Residuals, "_refuse_draw", refuse)


def _residual_is_target(patch: pytest.MonkeyPatch) -> None:
    """After the sampled child failed, y ~ p."""
    _residual_not_updated(patch)
    weights = Residuals.next_weights

    def target(self: Residuals, rows: Sequence[int]) -> Tensor:
        self.proposals = [replace(one, drawn=()) for one in self.proposals]
        return weights(self, rows)

    patch.setattr(Residuals, "next_weights", target)


def _residual_is_target_on_the_fixed(patch: pytest.MonkeyPatch) -> None:
    """After the sampled child failed, y ~ p restricted to the deterministic children."""
    _residual_is_target(patch)
    enter = Residuals._enter

    def restricted(self: Residuals, r: int, node: int) -> int:
        fixed = self.proposals[r].fixed
        if node in fixed and self.proposals[r].drawn:
            self.total[r] = sum(self.weight[one] for one in fixed[fixed.index(node) :])
        return enter(self, r, node)

    patch.setattr(Residuals, "_enter", restricted)


def _missing_draw_skipped(patch: pytest.MonkeyPatch) -> None:
    """A draw that came to nothing changes nothing."""
    read = siblings.read_proposals

    def skipping(draft: Draft, tokens: Sequence[int]) -> object:
        proposals, further = read(draft, tokens)
        return [
            replace(one, distributions=(), drawn=()) if set(one.drawn) == {None} else one for one in proposals
        ], further

    patch.setattr(siblings, "read_proposals", skipping)


def _law_unconditional(patch: pytest.MonkeyPatch) -> None:
    """Drawn without replacement, tested with the distribution of the first draw."""

    def whole(self: Residuals, distributions: Tensor, further: Sequence[siblings.FurtherDistribution]) -> Tensor:
        for one in further:
            self.mass[one.node] = float(distributions[one.distribution, self.tokens[one.node]])
        return torch.cat((distributions, distributions[[one.distribution for one in further]]))

    patch.setattr(Residuals, "_with_further_distributions", whole)


def _reach_not_updated(patch: pytest.MonkeyPatch) -> None:
    """P stays what it was when a child is refused."""
    patch.setattr(Residuals, "_set_reach", lambda self, r, left: None)


def _one_draw_per_path(patch: pytest.MonkeyPatch) -> None:
    """Every deterministic child is tested by a draw of its own against the whole of p."""
    patch.setattr(Residuals, "_refuse_fixed", lambda self, r, node: None)


@pytest.mark.parametrize(
    ("rule", "breakage", "drafter", "least"),
    [
        ("tree", _residual_not_updated, SIBLINGS, 0.041),
        ("tree", _residual_is_target, PLUS_ONE, 0.079),
        ("tree", _residual_is_target_on_the_fixed, PLUS_ONE, 0.072),
        ("tree", _missing_draw_skipped, THINNED, 0.015),
        ("tree", _law_unconditional, SIBLINGS, 0.038),
        ("tree", _law_unconditional, THREE, 0.038),
        ("tree", _one_draw_per_path, FIXED, 0.023),
        ("traversal", _residual_is_target, PLUS_ONE, 0.067),
        ("traversal", _missing_draw_skipped, THINNED, 0.015),
        ("traversal", _reach_not_updated, SIBLINGS, 0.034),
        ("traversal", _reach_not_updated, FIXED, 0.055),
        ("traversal", _law_unconditional, SIBLINGS, 0.038),
        ("traversal", _law_unconditional, TWO_AND_ONE, 0.094),
    ],
)
def test_a_broken_tree_rule_shows(
    rule: str,
    breakage: Callable[[pytest.MonkeyPatch], None],
    drafter: Drafter,
    least: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert error(RULES[rule], drafter, TREE_TARGET, DEPTH + 1) < EXACT
    breakage(monkeypatch)
    assert error(RULES[rule], drafter, TREE_TARGET, DEPTH + 1) > least


def test_one_draw_per_path_accepts_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (.5, .2, .3), draft tokens 0 and 1: a shared draw accepts .7 of the time, a draw for each path .6."""
    target = RandomTables(3, 0)
    target[()] = np.array([0.5, 0.2, 0.3])
    cases = cases_of(
        lambda choice, text: row(
            choice, np.array([0.6, 0.3, 0.1]), lambda token: row(choice, target[()], None), fixed=2
        ),
        {(): 1.0},
    )

    def accepted() -> float:
        return sum(w for text, w in emitted_law(RULES["tree"], cases, target).items() if len(text) == 2)

    assert abs(accepted() - 0.7) < EXACT
    _one_draw_per_path(monkeypatch)
    assert abs(accepted() - 0.6) < EXACT
