"""How much a rule accepts: never less than the rule it sharpens, and the optimum where theory says so."""

import itertools

import numpy as np
import pytest

from foretoken.verify import RULES
from tests.helpers.enumeration import (
    EXACT,
    Distribution,
    Drafter,
    RandomTables,
    Tables,
    cases_of,
    emitted_law,
    max_error,
)
from tests.verify.drafters import KINDS, TREES, chain_drafter, row, tree_drafter


def _emitted(rule: str, drafter: Drafter, target: Tables) -> Distribution:
    return emitted_law(RULES[rule], cases_of(drafter, {(): 1.0}), target)


def _tokens(distribution: Distribution) -> float:
    """Expected number of emitted tokens."""
    return sum(weight * len(text) for text, weight in distribution.items())


@pytest.mark.parametrize("kind", KINDS)
def test_block_never_emits_fewer_tokens_than_rejection(kind: str) -> None:
    gains = []
    for (vocab, length), seed in itertools.product(((2, 3), (3, 3), (4, 2)), range(6)):
        target, drafter = RandomTables(vocab, seed), chain_drafter(kind, length, RandomTables(vocab, seed + 100), seed)
        gains.append(_tokens(_emitted("block", drafter, target)) - _tokens(_emitted("rejection", drafter, target)))
    assert min(gains) > -EXACT
    assert max(gains) < EXACT if kind == "point" else max(gains) > 0.001


@pytest.mark.parametrize("kind", TREES)
def test_traversal_never_emits_fewer_tokens_than_tree(kind: str) -> None:
    gains = []
    for vocab, seed in itertools.product((2, 3), range(4)):
        target, drafter = RandomTables(vocab, seed), tree_drafter(kind, 2, RandomTables(vocab, seed + 100), seed)
        gains.append(_tokens(_emitted("traversal", drafter, target)) - _tokens(_emitted("tree", drafter, target)))
    assert min(gains) > -EXACT
    if kind == "fixed":
        assert max(gains) < EXACT


def test_the_toy_of_the_block_paper() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens: 10/9 accepted token by token, 11/9 as a block (arXiv
    2403.10444, section 2).
    """
    target, distributions = RandomTables(2, 0), RandomTables(2, 0)
    for text in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)):
        target[text], distributions[text] = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    drafter = chain_drafter("model", 2, distributions, 0)
    for rule, accepted in (("rejection", 10 / 9), ("tree", 10 / 9), ("block", 11 / 9), ("traversal", 11 / 9)):
        assert abs(_tokens(_emitted(rule, drafter, target)) - 1 - accepted) < EXACT


@pytest.mark.parametrize(("on_trees", "on_chains"), [("tree", "rejection"), ("traversal", "block")])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_chain_the_tree_rules_are_the_chain_rules(on_trees: str, on_chains: str, kind: str) -> None:
    for (vocab, length), holes in itertools.product(((2, 3), (3, 3)), (0.0, 0.3)):
        target, drafter = RandomTables(vocab, 5, holes=holes), chain_drafter(kind, length, RandomTables(vocab, 6), 7)
        assert max_error(_emitted(on_trees, drafter, target), _emitted(on_chains, drafter, target)) < EXACT


@pytest.mark.parametrize("kind", TREES)
def test_on_one_level_traversal_is_tree(kind: str) -> None:
    for vocab in (2, 3, 4):
        target, drafter = RandomTables(vocab, 8), tree_drafter(kind, 1, RandomTables(vocab, 9), 10)
        assert max_error(_emitted("traversal", drafter, target), _emitted("tree", drafter, target)) < EXACT


def _transport_value(p: np.ndarray, drafts: dict[frozenset[int], float]) -> float:
    """The most any lossless rule can accept: 1 + min over token sets H of p(H) - P(all drafts lie in H)."""
    sets = [frozenset(h) for size in range(len(p) + 1) for h in itertools.combinations(range(len(p)), size)]
    return 1 + min(p[list(h)].sum() - sum(weight for tokens, weight in drafts.items() if tokens <= h) for h in sets)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_plus_one_accepts_what_optimal_transport_allows(seed: int) -> None:
    """One sampled draft token beside deterministic ones, with and without thinning: no rule accepts more of this
    proposal.
    """
    rng = np.random.default_rng([seed, 77])
    vocab, fixed = int(rng.integers(3, 6)), int(rng.integers(0, 3))
    target, q = RandomTables(vocab, seed), rng.dirichlet(np.full(vocab, 0.7))
    keep = None if seed % 3 == 0 else rng.random(vocab) if seed % 3 == 1 else np.full(vocab, rng.uniform(0.3, 1))
    cases = cases_of(lambda choice, text: row(choice, q, lambda token: row(choice, q, None), fixed, 1, keep), {(): 1.0})
    drafts: dict[frozenset[int], float] = {}
    for case in cases:
        tokens = frozenset(case.layout.tokens)
        drafts[tokens] = drafts.get(tokens, 0.0) + case.weight
    distribution = emitted_law(RULES["tree"], cases, target)
    assert (
        abs(
            sum(weight for text, weight in distribution.items() if len(text) == 2)
            - _transport_value(target[()], drafts)
        )
        < EXACT
    )


def test_acceptance_is_the_overlap_of_the_laws() -> None:
    target, distributions = RandomTables(4, seed=15), RandomTables(4, seed=16)
    for rule in ("rejection", "block", "tree", "traversal"):
        distribution = _emitted(rule, chain_drafter("model", 1, distributions, 0), target)
        assert (
            abs(
                sum(w for text, w in distribution.items() if len(text) == 2)
                - np.minimum(target[()], distributions[()]).sum()
            )
            < EXACT
        )


def test_several_draws_accept_more_than_one() -> None:
    """Mean acceptance of one level over random distributions: one draw < two draws < one deterministic and one
    drawn.
    """
    accepted = {"one": 0.0, "two": 0.0, "plus_one": 0.0}
    for seed in range(40):
        rng = np.random.default_rng([seed, 5])
        logits = rng.normal(size=5) * 1.5
        p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, logits + rng.normal(size=5)))
        target = RandomTables(5, seed)
        target[()] = p
        for name, (fixed, drawn) in (("one", (0, 1)), ("two", (0, 2)), ("plus_one", (1, 1))):

            def grow(choice, text, f=fixed, d=drawn, distribution=q):
                return row(choice, distribution, lambda token: row(choice, distribution, None), f, d)

            accepted[name] += sum(w for text, w in _emitted("tree", grow, target).items() if len(text) == 2) / 40
    assert accepted["one"] + 0.05 < accepted["two"] < accepted["plus_one"] - 0.005
