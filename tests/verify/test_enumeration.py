"""The distribution of what a round emits equals the target's distribution, to rounding, for every rule and every way of
producing a draft.
"""

import itertools

import numpy as np
import pytest

from foretoken.verify import RULES
from tests.helpers.enumeration import (
    EXACT,
    RandomTables,
    Tables,
    cases_of,
    chained,
    check_decisions,
    complete,
    emitted_law,
    joint,
    max_error,
    point,
)
from tests.helpers.usual import some_of
from tests.verify.drafters import KINDS, TREES, chain_drafter, tree_drafter

RATIO = ("rejection", "block", "tree", "traversal")  # rules that take uniforms
SAMPLED = (*RATIO, "coupled")  # coupled: the distribution of its race, for drafts that do not know the noise
ON_TREES = ("tree", "traversal")
# Sizes of the vocabulary, and shares of the target's tokens that are impossible: every pair of them in `make proof`.
SHAPES = some_of(itertools.product((2, 3, 4), (0.0, 0.4)), {(2, 0.0), (3, 0.4)})


def _error(rule: str, drafter, target: Tables, length: int) -> float:
    distribution = emitted_law(RULES[rule], cases_of(drafter, {(): 1.0}), target)
    return max_error(complete(distribution, target, length), joint(target, length))


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "holes"), SHAPES)
def test_one_round_has_the_law_of_the_target(rule: str, kind: str, vocab: int, holes: float) -> None:
    for length, draft_holes in itertools.product(range(4), (0.0, 0.4)):
        target, distributions = RandomTables(vocab, seed=1, holes=holes), RandomTables(vocab, seed=2, holes=draft_holes)
        assert _error(rule, chain_drafter(kind, length, distributions, seed=3), target, length + 1) < EXACT


@pytest.mark.parametrize(
    ("rule", "kind"),
    # Which of two equal draft tokens the coupled rule follows depends on the noise: see test_coupled.py.
    [(rule, kind) for rule in (*ON_TREES, "coupled") for kind in TREES if (rule, kind) != ("coupled", "twice")],
)
@pytest.mark.parametrize(("vocab", "holes"), SHAPES)
def test_one_round_on_a_tree_has_the_law_of_the_target(rule: str, kind: str, vocab: int, holes: float) -> None:
    depth = 1 if (vocab, kind) == (4, "siblings") else 2  # two levels of these would be 1728 drafts
    for seed, draft_holes in ((1, 0.0), (2, 0.4)):
        target, distributions = (
            RandomTables(vocab, seed, holes=holes),
            RandomTables(vocab, seed + 10, holes=draft_holes),
        )
        assert _error(rule, tree_drafter(kind, depth, distributions, seed), target, 3) < EXACT


@pytest.mark.parametrize("rule", ON_TREES)
@pytest.mark.parametrize("kind", ["fixed", "plus_one", "uneven", "twice"])
def test_deeper_trees(rule: str, kind: str) -> None:
    target, distributions = RandomTables(2, seed=31), RandomTables(2, seed=32)
    assert _error(rule, tree_drafter(kind, 3, distributions, 33), target, 4) < EXACT


@pytest.mark.parametrize("rule", RATIO)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", some_of([2, 3, 4], {3}))
def test_decisions_agree_with_the_probabilities(rule: str, kind: str, vocab: int) -> None:
    for length, holes in itertools.product((0, 1, 2), (0.0, 0.3)):
        target, distributions = RandomTables(vocab, seed=4, holes=holes), RandomTables(vocab, seed=5, holes=holes)
        assert (
            check_decisions(RULES[rule], cases_of(chain_drafter(kind, length, distributions, 6), {(): 1.0}), target) > 0
        )


@pytest.mark.parametrize("rule", ON_TREES)
@pytest.mark.parametrize("kind", TREES)
def test_decisions_on_trees_agree_with_the_probabilities(rule: str, kind: str) -> None:
    for vocab, holes in itertools.product((2, 3), (0.0, 0.3)):
        target, distributions = RandomTables(vocab, seed=34, holes=holes), RandomTables(vocab, seed=35, holes=holes)
        assert check_decisions(RULES[rule], cases_of(tree_drafter(kind, 2, distributions, 36), {(): 1.0}), target) > 0


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize(("vocab", "length"), some_of([(2, 3), (3, 2), (4, 1)], {(2, 3)}))
@pytest.mark.parametrize("first", KINDS)
def test_two_rounds_with_another_drafter_in_the_second(rule: str, first: str, vocab: int, length: int) -> None:
    second = KINDS[(KINDS.index(first) + 3) % len(KINDS)]
    target = RandomTables(vocab, seed=7)
    drafters = [
        chain_drafter(first, length, RandomTables(vocab, seed=8), 9),
        chain_drafter(second, length, RandomTables(vocab, seed=10), 11),
    ]
    horizon = length + 2
    assert max_error(chained(RULES[rule], drafters, target, horizon), joint(target, horizon)) < EXACT


@pytest.mark.parametrize("rule", ON_TREES)
@pytest.mark.parametrize("first", TREES)
def test_two_rounds_of_trees_with_another_drafter_in_the_second(rule: str, first: str) -> None:
    second = TREES[(TREES.index(first) + 4) % len(TREES)]
    target = RandomTables(3, seed=37)
    drafters = [
        tree_drafter(first, 2, RandomTables(3, seed=38), 39),
        tree_drafter(second, 1, RandomTables(3, seed=40), 41),
    ]
    assert max_error(chained(RULES[rule], drafters, target, 4), joint(target, 4)) < EXACT


@pytest.mark.parametrize("rule", ["greedy", *SAMPLED])
@pytest.mark.parametrize("kind", KINDS)
def test_a_point_target_is_followed_to_the_letter(rule: str, kind: str) -> None:
    vocab, length = 3, 3
    target = _Points(RandomTables(vocab, seed=12))
    cases = cases_of(chain_drafter(kind, length, RandomTables(vocab, seed=13), 14), {(): 1.0})
    distribution = emitted_law(RULES[rule], cases, target)
    assert max_error(complete(distribution, target, length + 1), joint(target, length + 1)) < EXACT
    if rule != "coupled":
        assert check_decisions(RULES[rule], cases, target) > 0


@pytest.mark.parametrize("rule", ["greedy", *ON_TREES])
@pytest.mark.parametrize("kind", [kind for kind in TREES if kind != "twice"])
def test_a_point_target_is_followed_through_a_tree(rule: str, kind: str) -> None:
    target = _Points(RandomTables(3, seed=42))
    cases = cases_of(tree_drafter(kind, 2, RandomTables(3, seed=43), 44), {(): 1.0})
    distribution = emitted_law(RULES[rule], cases, target)
    assert max_error(complete(distribution, target, 3), joint(target, 3)) < EXACT
    if kind != "overlap" or rule != "greedy":  # greedy may follow either of two equal draft tokens
        assert check_decisions(RULES[rule], cases, target) > 0


class _Points(dict):
    """The distribution at temperature 0 of another family of distributions."""

    def __init__(self, soft: Tables):
        super().__init__()
        self.soft = soft

    def __missing__(self, context: tuple[int, ...]) -> np.ndarray:
        self[context] = point(len(self.soft[context]), int(np.argmax(self.soft[context])))
        return self[context]
