"""Merged draft tokens: what stands in the tree, and that no distribution is bent by it, by enumeration of every draw in
float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foretoken.core import Draft, Mass
from foretoken.draft.merging import keep_nodes
from foretoken.draft.mix import graft, share_of
from foretoken.draft.tree import TreeNode, merge_trees
from foretoken.verify import RULES, resolve, rule_for
from tests.helpers.enumeration import (
    EXACT,
    Case,
    Child,
    Choice,
    RandomTables,
    Spot,
    Tables,
    Tokens,
    cases_of,
    chained,
    complete,
    draft_of,
    emitted_law,
    joint,
    max_error,
)
from tests.verify.drafters import chain_drafter

NAMES = ("ngram", "suffix")
VOCAB = 3


def lookups(text: Tokens, seed: int) -> list[TreeNode]:
    """What two lookups say after a text: two trees with draft tokens in common."""
    rng = np.random.default_rng([seed, *text])
    trees = []
    for part in range(2):
        tokens = rng.integers(VOCAB, size=4).tolist()
        chances = np.sort(rng.random(4))[::-1].tolist()
        parents = (-1, 0, -1, 1) if tokens[0] != tokens[2] else (-1, 0, 1, 2)
        trees.append([TreeNode(*node, NAMES[part]) for node in zip(tokens, parents, chances, strict=True)])
    return merge_trees(trees, 8)


def spot_of(draft: Draft, row: int = 0) -> Spot:
    """One request's draft as the enumeration knows trees."""
    distribution = draft.mass.distribution_of_row[row] if draft.mass is not None else -1
    mu = draft.mass.distributions[distribution].numpy() if distribution >= 0 else None
    nodes = [node for node, parent in enumerate(draft.parents) if parent == row - 1]
    return Spot(
        mu,
        tuple(
            Child(int(draft.tokens[node]), bool(draft.sampled and draft.sampled[node]), spot_of(draft, node + 1))
            for node in nodes
        ),
    )


def merged(
    kind: str, distributions: Tables, seed: int, length: int = 2, budget: int = 4, said: list[TreeNode] | None = None
) -> Callable[[Choice, Tokens], Spot]:
    """A drafter that draws a chain and adds what the lookups say (`said`, if given), as `MixDrafter` does."""
    draw = chain_drafter(kind, length, distributions, seed)

    def propose(choice: Choice, context: Tokens) -> Spot:
        base = draft_of([draw(choice, context)])
        return spot_of(graft("mix", base, [lookups(context, seed) if said is None else said], [budget]))

    return propose


@pytest.mark.parametrize("rule", ["tree", "traversal", "coupled"])
@pytest.mark.parametrize("kind", ["model", "coin", "stopped", "cut", "point", "dropped"])
@pytest.mark.parametrize("budget", [2, 3, 5])
def test_a_merged_tree_has_the_law_of_the_target(rule: str, kind: str, budget: int) -> None:
    """Also where draft tokens of the lookups say what was drawn, and where room that this leaves goes to others."""
    for seed, holes in itertools.product(range(5), (0.0, 0.4)):
        target, distributions = RandomTables(VOCAB, seed, holes=holes), RandomTables(VOCAB, seed + 10, holes=holes)
        distribution = emitted_law(
            RULES[rule], cases_of(merged(kind, distributions, seed, budget=budget), {(): 1.0}), target
        )
        assert max_error(complete(distribution, target, 4), joint(target, 4)) < EXACT


@pytest.mark.parametrize("rule", ["tree", "traversal"])
def test_two_merged_rounds_have_the_law_of_the_target(rule: str) -> None:
    target = RandomTables(VOCAB, 5)
    rounds = [merged("model", RandomTables(VOCAB, 6), 1), merged("coin", RandomTables(VOCAB, 7), 2)]
    assert max_error(chained(RULES[rule], rounds, target, 3), joint(target, 3)) < EXACT


def _error_by_shape(choose: Callable[[Case], str], seed: int) -> float:
    """With the rule that `choose` takes for each draft, where a lookup says one chain: a draw that agrees with it
    leaves a chain.
    """
    target, distributions = RandomTables(VOCAB, seed), RandomTables(VOCAB, seed + 10)
    said = [TreeNode(0, -1, 0.5), TreeNode(1, 0, 0.4)]
    groups: dict[str, list[Case]] = {}
    for case in cases_of(merged("model", distributions, seed, said=said), {(): 1.0}):
        groups.setdefault(choose(case), []).append(case)
    distribution: dict[Tokens, float] = {}
    for rule, cases in groups.items():
        for text, weight in emitted_law(RULES[rule], cases, target).items():
            distribution[text] = distribution.get(text, 0.0) + weight
    return max_error(complete(distribution, target, 4), joint(target, 4))


def test_a_rule_chosen_by_the_shape_of_a_merged_draft_would_bend_the_law() -> None:
    """The shape tells what was drawn; that is why a merged request's rule is `tree` whatever its drafts look like."""
    assert max(_error_by_shape(lambda case: rule_for(draft_of([case.drafted]), 0), seed) for seed in range(8)) > 0.01
    assert (
        max(
            _error_by_shape(lambda _: resolve("auto", greedy=False, shape_follows_draws=True), seed)
            for seed in range(8)
        )
        < EXACT
    )


@pytest.mark.parametrize("wrong", ["the drawn token gives way", "the drawn token is dropped for room"])
def test_wrong_ways_to_merge_are_seen(wrong: str) -> None:
    def propose(choice: Choice, context: Tokens) -> Spot:
        chain = chain_drafter("model", 1, distributions, seed)(choice, context)
        said = lookups(context, seed)
        if wrong == "the drawn token gives way":
            fixed = dict.fromkeys(node.token for node in said if node.parent < 0)
            drawn = () if chain[0].token in fixed else (Child(chain[0].token, True),)
            return Spot(chain[0].mu if drawn else None, (*drawn, *(Child(token) for token in fixed)))
        return (
            Spot(None, (Child(said[0].token),))
            if chain[0].token > 0
            else Spot(chain[0].mu, (Child(chain[0].token, True),))
        )

    errors = []
    for seed in range(6):
        target, distributions = RandomTables(VOCAB, seed), RandomTables(VOCAB, seed + 10)
        distribution = emitted_law(RULES["tree"], cases_of(propose, {(): 1.0}), target)
        errors.append(max_error(complete(distribution, target, 3), joint(target, 3)))
    assert max(errors) > 0.02


def test_how_many_are_drawn_is_settled_by_chances_alone() -> None:
    found = [TreeNode(1, -1, 0.9), TreeNode(2, 0, 0.5), TreeNode(3, 1, 0.3)]
    assert share_of([0.8, 0.4, 0.1], found, 4) == 2
    assert share_of([0.8, 0.4, 0.1], found, 1) == 0
    assert share_of([0.8, 0.4], [], 4) == 2


def drawn(tokens: tuple[int, ...], offsets: tuple[int, ...]) -> Draft:
    """Chains of a model, all under distributions of their own."""
    rows = len(tokens) + len(offsets) - 1
    parents = tuple(node - start for start, stop in itertools.pairwise(offsets) for node in range(start, stop))
    ends = {stop + b for b, stop in enumerate(offsets[1:])}
    distribution_of_row, count = [], 0
    for row in range(rows):
        distribution_of_row.append(-1 if row in ends else count)
        count += row not in ends
    distributions = torch.full((count, 10), 0.1)
    names = tuple("draft_model" if stop > start else None for start, stop in itertools.pairwise(offsets))
    return Draft(
        torch.tensor(tokens),
        tuple(p - 1 for p in parents),
        offsets,
        names,
        (True,) * len(tokens),
        Mass(distributions, tuple(distribution_of_row)),
    )


def test_graft_keeps_what_was_drawn_and_the_provenance_of_every_node() -> None:
    base = drawn((1, 2, 4), (0, 2, 2, 3))
    first = [
        TreeNode(1, -1, 0.9, "ngram"),
        TreeNode(3, 0, 0.8, "ngram"),
        TreeNode(2, 0, 0.7, "ngram"),
        TreeNode(7, 2, 0.6, "ngram"),
    ]
    second = [TreeNode(8, -1, 0.5, "suffix"), TreeNode(9, 0, 0.4, "suffix")]
    draft = graft("mix", base, [first, second, []], [4, 1, 3])
    assert draft.tokens.tolist() == [1, 2, 3, 7, 8, 4]
    assert draft.parents == (
        -1,
        0,
        0,
        1,
        -1,
        -1,
    )  # 1 and 2 were drawn: what follows them in the lookup follows them here
    assert draft.offsets == (0, 4, 5, 6)
    assert draft.drafters == ("mix",) * 3
    assert draft.provenance == ("draft_model", "draft_model", "ngram", "ngram", "suffix", "draft_model")
    assert draft.sampled == (True, True, False, False, False, True)
    assert draft.mass is not None
    assert draft.mass.distribution_of_row == (0, 1, -1, -1, -1, -1, -1, 2, -1)


@pytest.mark.parametrize("seed", range(20))
def test_first_nodes_undo_a_graft(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size=3)
    base = drawn(tuple(rng.integers(VOCAB, size=lengths.sum()).tolist()), tuple(np.cumsum([0, *lengths]).tolist()))
    found = [lookups((b,), seed) for b in range(3)]
    draft = graft("mix", base, found, [6] * 3)
    assert sum(draft.lengths) > sum(base.lengths)
    assert all(length <= 6 for length in draft.lengths)
    for b in range(3):
        paths = draft.paths(b)
        assert len(set(paths)) == len(paths), "one node stands twice"
        own = found[b]
        said = {path for node in range(len(own)) for path in [_path(own, node)]}
        assert set(paths[1 + base.lengths[b] :]) <= said
    back = keep_nodes(draft, [range(count) for count in base.lengths])
    assert torch.equal(back.tokens, base.tokens)
    assert (back.parents, back.offsets, back.sampled) == (base.parents, base.offsets, base.sampled)
    assert back.mass is not None
    assert base.mass is not None
    assert back.mass.distribution_of_row == base.mass.distribution_of_row


def _path(tree: list[TreeNode], node: int) -> Tokens:
    return () if node < 0 else (*_path(tree, tree[node].parent), tree[node].token)
