"""What holds for every rule on every batch: possible tokens, distributions, no neighbours, no order, no rule but the
own; and exactness at extremes.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.verify import RULES, base, rule_for, verify_batch
from tests.helpers.enumeration import cases_of, complete, emitted_law, joint, max_error
from tests.verify.batches import ANY, QUICK, Extreme, alone, part, random_batch, renumbered
from tests.verify.drafters import KINDS, TREES, chain_drafter, tree_drafter

GREEDY = RULES["greedy"]


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_what_is_emitted_is_possible_and_a_path_of_the_draft(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    verdict = RULES[rule].verify(draft, probs, uniforms)
    for b in range(draft.num_requests):
        own = draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()
        path = (-1, *verdict.paths[b])
        assert all(draft.parents[draft.offsets[b] + node] == above for above, node in pairwise(path))
        assert verdict.emitted(b) == (*(own[node] for node in verdict.paths[b]), verdict.next_tokens[b])
        rows = [draft.anchor_row(b) + 1 + node for node in path]
        assert all(probs[row, token] > 0 for row, token in zip(rows, verdict.emitted(b), strict=True))


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_branch_weights_are_laws(rule: str, tree: bool, seed: int) -> None:
    draft, probs, _ = random_batch(seed, tree)
    accept = RULES[rule].accept_probabilities(draft, probs)
    assert accept.shape == (draft.num_nodes,)
    assert accept.dtype == probs.dtype
    assert ((accept >= 0) & (accept <= 1)).all()
    total = torch.zeros(draft.num_rows, dtype=torch.float64).index_add_(
        0, torch.tensor(draft.parent_rows, dtype=torch.int64), accept.double()
    )
    assert (total < 1 + 1e-5).all()
    if rule != "coupled":  # where every token of a row was drafted nothing can end the round there, and nothing is left
        weights = RULES[rule].next_token_weights(draft, probs, range(draft.num_rows))
        assert (weights >= 0).all()
        assert (weights.sum(-1) > 0).all()


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_distributions_may_be_numbered_in_any_order(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    if draft.mass is None:
        return
    order = np.random.default_rng(seed).permutation(len(draft.mass.distributions))
    numbers = tuple(int(np.flatnonzero(order == one)[0]) if one >= 0 else -1 for one in draft.mass.distribution_of_row)
    other = replace(
        draft, mass=replace(draft.mass, distributions=draft.mass.distributions[order], distribution_of_row=numbers)
    )
    assert RULES[rule].verify(other, probs, uniforms) == RULES[rule].verify(draft, probs, uniforms)


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_nothing_is_written_to_and_rows_may_be_asked_for_in_any_order(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    distributions, race = () if draft.mass is None else (draft.mass.distributions,), uniforms.race
    before = [part.clone() for part in (probs, draft.tokens, uniforms.accept, uniforms.next, *distributions, *race)]
    RULES[rule].verify(draft, probs, uniforms)
    RULES[rule].accept_probabilities(draft, probs)
    whole = RULES[rule].next_token_weights(draft, probs, range(draft.num_rows))
    rows = [int(row) for row in np.random.default_rng(seed).permutation(draft.num_rows)[: 1 + seed % draft.num_rows]]
    assert torch.equal(RULES[rule].next_token_weights(draft, probs, rows), whole[rows])
    assert all(
        torch.equal(part, old)
        for part, old in zip(
            (probs, draft.tokens, uniforms.accept, uniforms.next, *distributions, *race), before, strict=True
        )
    )


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_a_request_does_not_depend_on_its_neighbours(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    whole = RULES[rule].verify(draft, probs, uniforms)
    for b in range(draft.num_requests):
        assert part(whole, b) == part(RULES[rule].verify(*alone(draft, probs, uniforms, b)), 0)


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.takes_trees])
def test_the_order_in_which_a_tree_is_numbered_does_not_matter(rule: str, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree=True)
    *other, orders = renumbered(draft, probs, uniforms, seed)
    verdict, twin = RULES[rule].verify(draft, probs, uniforms), RULES[rule].verify(*other)
    assert (twin.accepted, twin.next_tokens, twin.next_kinds) == (
        verdict.accepted,
        verdict.next_tokens,
        verdict.next_kinds,
    )
    assert [tuple(order[node] for node in path) for order, path in zip(orders, twin.paths, strict=True)] == list(
        verdict.paths
    )


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("tree", [False, True])
def test_a_batch_that_mixes_rules_equals_each_request_alone(tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    names = ["auto", *(name for name, rule in RULES.items() if rule.takes_trees or not tree)]
    rules = [str(name) for name in np.random.default_rng(seed).choice(names, draft.num_requests)]
    whole = verify_batch(draft, probs, uniforms, rules)
    for b, rule in enumerate(rules):
        own = alone(draft, probs, uniforms, b)
        assert part(whole, b) == part(RULES[rule_for(own[0], 0) if rule == "auto" else rule].verify(*own), 0)


@QUICK
@given(st.integers(0, 2**32))
def test_a_batch_without_a_race_can_mix_rules(seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    rules = [str(name) for name in np.random.default_rng(seed).choice(["rejection", "block"], draft.num_requests)]
    assert verify_batch(draft, probs, replace(uniforms, race=()), rules) == verify_batch(draft, probs, uniforms, rules)


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("rule", ["rejection", "block", "tree", "traversal", "coupled", "typical"])
def test_at_temperature_zero_every_rule_is_greedy(rule: str, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    hot = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1)
    verdict, expected = RULES[rule].verify(draft, hot, uniforms), GREEDY.verify(draft, probs, uniforms)
    assert replace(verdict, probabilities=()) == replace(expected, probabilities=())
    if rule in ("rejection", "tree", "typical"):
        assert verdict == expected


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("on_trees", "on_chains"), [("tree", "rejection"), ("traversal", "block")])
def test_on_chains_the_tree_rules_decide_like_the_chain_rules(on_trees: str, on_chains: str, seed: int) -> None:
    """The same numbers give the same verdict, not only the same distribution."""
    draft, probs, uniforms = random_batch(seed)
    verdict, expected = RULES[on_trees].verify(draft, probs, uniforms), RULES[on_chains].verify(draft, probs, uniforms)
    assert replace(verdict, probabilities=()) == replace(expected, probabilities=())
    for own, known in zip(verdict.probabilities, expected.probabilities, strict=True):
        # How likely each prefix is: the chance of a step from where no walk comes may be all rounding.
        assert np.allclose(
            np.cumprod(own), np.cumprod(known), rtol=0, atol=1e-6 if probs.dtype == torch.float32 else 1e-13
        )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([2, 3]))
@pytest.mark.parametrize("rule", ["rejection", "block", "tree", "traversal", "coupled"])
def test_the_law_is_exact_for_extreme_laws(rule: str, seed: int, kind: str, vocab: int) -> None:
    target = Extreme(vocab, seed)
    distribution = emitted_law(
        RULES[rule], cases_of(chain_drafter(kind, 2, Extreme(vocab, seed + 1, target), seed), {(): 1.0}), target
    )
    assert max_error(complete(distribution, target, 3), joint(target, 3)) < 1e-12


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(TREES), st.sampled_from([2, 3]))
@pytest.mark.parametrize("rule", ["tree", "traversal"])
def test_the_law_is_exact_for_extreme_laws_on_trees(rule: str, seed: int, kind: str, vocab: int) -> None:
    target = Extreme(vocab, seed)
    distribution = emitted_law(
        RULES[rule], cases_of(tree_drafter(kind, 2, Extreme(vocab, seed + 1, target), seed), {(): 1.0}), target
    )
    assert max_error(complete(distribution, target, 3), joint(target, 3)) < 1e-12


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), [("block", False), ("tree", True), ("traversal", True)])
def test_working_in_pieces_changes_nothing(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    whole = RULES[rule].verify(draft, probs, uniforms)
    for rows in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "_CACHED_NUMBERS", rows * probs.shape[-1])
            assert [len(some) for some in base.pieces(range(5), probs)] == ([1] * 5 if rows == 0 else [2, 2, 1])
            assert RULES[rule].verify(draft, probs, uniforms) == whole
