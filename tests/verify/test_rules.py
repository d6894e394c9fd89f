"""Properties of the rules on random drafts, the draw from weights, the registry and batches that mix rules."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core import Draft, Mass, Uniforms, Verdict, empty_draft
from foretoken.errors import ConfigError
from foretoken.verify import RULES, draw, is_lossless, needs_race, resolve, rule_for, verify_batch
from tests.helpers.enumeration import RandomTables, cases_of, check_decisions, complete, emitted_law, joint, max_error, point
from tests.verify.drafters import KINDS, TREES, chain_drafter, tree_drafter

REJECTION, GREEDY = RULES["rejection"], RULES["greedy"]
LOSSLESS = ("greedy", "rejection", "block", "coupled", "tree", "traversal")
ON_CHAINS = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
ON_TREES = [name for name in ON_CHAINS if RULES[name].takes_trees]
ANY = [(name, tree) for name, rule in RULES.items() for tree in (False, True) if rule.takes_trees or not tree]
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def random_law(rng: np.random.Generator, vocab: int, mass: float = 1.0) -> np.ndarray:
    """A law with holes, sometimes a point, sometimes flat, sometimes with weights that only just exist."""
    shape = rng.integers(5)
    law = np.full(vocab, 1.0) if shape == 0 else rng.dirichlet(np.full(vocab, 0.3)) * (rng.random(vocab) > 0.4)
    if shape == 1 or law.sum() == 0:
        law = point(vocab, int(rng.integers(vocab)))
    if shape == 2:
        law = law + 10.0 ** -rng.uniform(5, 44, vocab)
    return mass * law / law.sum()


def random_parents(rng: np.random.Generator, tree: bool) -> list[int]:
    """The parents of up to seven nodes, in any order that puts parents first."""
    return [int(rng.integers(-1, node)) if tree else node - 1 for node in range(rng.integers(0, 8 if tree else 5))]


def random_batch(seed: int, tree: bool = False) -> tuple[Draft, torch.Tensor, Uniforms]:
    """Chains or trees of different sizes, kinds and masses, some with a law where nothing was proposed; and all the numbers a rule may need."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(1, 7))
    tokens, parents, offsets, sampled, laws, law_of_row = [], [], [0], [], [], []
    for _ in range(rng.integers(1, 6)):
        own = random_parents(rng, tree)
        rows: list[int] = []
        for row in range(len(own) + 1):
            has_law = rng.random() < (0.7 if row - 1 in own else 0.2)
            laws += [random_law(rng, vocab, float(rng.choice([1.0, 0.6])))] if has_law else []
            rows.append(len(laws) - 1 if has_law else -1)
        drawn: dict[int, set[int]] = {}
        for parent in own:
            law = laws[rows[parent + 1]].copy() if rows[parent + 1] >= 0 else np.zeros(vocab)
            law[list(drawn.get(parent, ()))] = 0
            from_law = law.sum() > 0 and (not tree or rng.random() < 0.6)
            sampled.append(bool(from_law))
            tokens.append(int(rng.choice(vocab, p=law / law.sum())) if from_law else int(rng.integers(vocab)))
            if from_law:
                drawn.setdefault(parent, set()).add(tokens[-1])
        parents += own
        law_of_row += rows
        offsets.append(len(tokens))
    num_rows = len(law_of_row)
    target = np.array([random_law(rng, vocab) for _ in range(num_rows)])
    if rng.random() < 0.4:
        off = float(rng.choice([0.0, 1e-7, 1e-12]))
        for row, law in enumerate(law_of_row):
            if law >= 0:  # the drafter is the target, or nearly: nothing is left after a rejection but rounding
                near = laws[law] * (1 + off * rng.standard_normal(vocab))
                target[row] = near / near.sum()
    edge = rng.choice([0.0, 1 - 2.0**-53, 0.5], size=len(tokens))
    accept = np.where(rng.random(len(tokens)) < 0.3, edge, rng.random(len(tokens)))
    following = np.where(rng.random(len(offsets) - 1) < 0.3, 1 - 2.0**-53, rng.random(len(offsets) - 1))
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    mass = Mass(torch.tensor(np.array(laws), dtype=dtype), tuple(law_of_row)) if laws else None
    draft = Draft(
        torch.tensor(tokens, dtype=torch.int64), tuple(parents), tuple(offsets), ("toy",) * (len(offsets) - 1), tuple(sampled) if laws else (), mass
    )
    race = tuple(torch.tensor(rng.exponential(size=(1 + length, vocab))) for length in draft.lengths)
    return draft, torch.tensor(target, dtype=dtype), Uniforms(torch.tensor(accept), torch.tensor(following), race)


def part(verdict: Verdict, b: int) -> tuple[object, ...]:
    return verdict.paths[b], verdict.accepted[b], verdict.next_tokens[b], verdict.next_kinds[b], verdict.probabilities[b]


def alone(draft: Draft, probs: torch.Tensor, uniforms: Uniforms, b: int) -> tuple[Draft, torch.Tensor, Uniforms]:
    nodes = slice(draft.offsets[b], draft.offsets[b + 1])
    return draft.select([b]), probs[draft.rows_of([b])], Uniforms(uniforms.accept[nodes], uniforms.next[b : b + 1], uniforms.race[b : b + 1])


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
    total = torch.zeros(draft.num_rows, dtype=torch.float64).index_add_(0, torch.tensor(draft.parent_rows, dtype=torch.int64), accept.double())
    assert (total < 1 + 1e-5).all()
    if rule != "coupled":  # where every token of a row was guessed nothing can end the round there, and nothing is left
        weights = RULES[rule].next_law(draft, probs, range(draft.num_rows))
        assert (weights >= 0).all()
        assert (weights.sum(-1) > 0).all()


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize(("rule", "tree"), ANY)
def test_a_request_does_not_depend_on_its_neighbours(rule: str, tree: bool, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree)
    whole = RULES[rule].verify(draft, probs, uniforms)
    for b in range(draft.num_requests):
        assert part(whole, b) == part(RULES[rule].verify(*alone(draft, probs, uniforms, b)), 0)


def renumbered(draft: Draft, probs: torch.Tensor, uniforms: Uniforms, seed: int) -> tuple[Draft, torch.Tensor, Uniforms, list[list[int]]]:
    """The same trees with their nodes in another order that puts parents first and keeps siblings in turn; and the old node of each new one."""
    rng, orders = np.random.default_rng(seed), []
    for b, length in enumerate(draft.lengths):
        parents, order = draft.parents[draft.offsets[b] : draft.offsets[b + 1]], []
        while len(order) < length:
            ready = [node for node in range(length) if node not in order and (parents[node] < 0 or parents[node] in order)]
            ready = [node for node in ready if all(twin in order for twin in range(node) if parents[twin] == parents[node])]
            order.append(int(rng.choice(ready)))
        orders.append(order)
    nodes = [draft.offsets[b] + node for b, order in enumerate(orders) for node in order]
    rows = [draft.anchor_row(b) + 1 + node for b, order in enumerate(orders) for node in (-1, *order)]
    parents = tuple(
        -1 if draft.parents[draft.offsets[b] + n] < 0 else o.index(draft.parents[draft.offsets[b] + n]) for b, o in enumerate(orders) for n in o
    )
    mass = None if draft.mass is None else Mass(draft.mass.laws, tuple(draft.mass.law_of_row[row] for row in rows))
    sampled = tuple(draft.sampled[node] for node in nodes) if draft.sampled else ()
    twin = Draft(draft.tokens[nodes], parents, draft.offsets, draft.drafters, sampled, mass)
    race = tuple(noise[[0, *(1 + node for node in order)]] for noise, order in zip(uniforms.race, orders, strict=True))
    return twin, probs[rows], Uniforms(uniforms.accept[nodes], uniforms.next, race), orders


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.takes_trees])
def test_the_order_in_which_a_tree_is_numbered_does_not_matter(rule: str, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed, tree=True)
    *other, orders = renumbered(draft, probs, uniforms, seed)
    verdict, twin = RULES[rule].verify(draft, probs, uniforms), RULES[rule].verify(*other)
    assert (twin.accepted, twin.next_tokens, twin.next_kinds) == (verdict.accepted, verdict.next_tokens, verdict.next_kinds)
    assert [tuple(order[node] for node in path) for order, path in zip(orders, twin.paths, strict=True)] == list(verdict.paths)


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
    """The same numbers give the same verdict, not only the same law."""
    draft, probs, uniforms = random_batch(seed)
    verdict, expected = RULES[on_trees].verify(draft, probs, uniforms), RULES[on_chains].verify(draft, probs, uniforms)
    assert replace(verdict, probabilities=()) == replace(expected, probabilities=())
    for own, known in zip(verdict.probabilities, expected.probabilities, strict=True):
        # How likely each prefix is: the chance of a step from where no walk comes may be all rounding.
        assert np.allclose(np.cumprod(own), np.cumprod(known), rtol=0, atol=1e-6 if probs.dtype == torch.float32 else 1e-13)


class Extreme(RandomTables):
    """Laws with holes, points, weights down to 1e-40, and some that nearly equal those of `near`."""

    def __init__(self, vocab: int, seed: int, near: RandomTables | None = None):
        super().__init__(vocab, seed)
        self.near = near

    def __missing__(self, text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 1, *text])
        law = random_law(rng, self.vocab)
        if self.near is not None and rng.random() < 0.5:
            law = self.near[text] * (1 + float(rng.choice([0.0, 1e-6, 1e-13])) * rng.standard_normal(self.vocab))
        self[text] = law / law.sum()
        return self[text]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([2, 3]))
@pytest.mark.parametrize("rule", ["rejection", "block", "tree", "traversal", "coupled"])
def test_the_law_is_exact_for_extreme_laws(rule: str, seed: int, kind: str, vocab: int) -> None:
    target = Extreme(vocab, seed)
    law = emitted_law(RULES[rule], cases_of(chain_drafter(kind, 2, Extreme(vocab, seed + 1, target), seed), {(): 1.0}), target)
    assert max_error(complete(law, target, 3), joint(target, 3)) < 1e-12


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(TREES), st.sampled_from([2, 3]))
@pytest.mark.parametrize("rule", ["tree", "traversal"])
def test_the_law_is_exact_for_extreme_laws_on_trees(rule: str, seed: int, kind: str, vocab: int) -> None:
    target = Extreme(vocab, seed)
    law = emitted_law(RULES[rule], cases_of(tree_drafter(kind, 2, Extreme(vocab, seed + 1, target), seed), {(): 1.0}), target)
    assert max_error(complete(law, target, 3), joint(target, 3)) < 1e-12


def test_zero_residual_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (True,), Mass(p[:1].clone(), (0, -1)))
    assert torch.equal(REJECTION.next_law(draft, p, [0]), p[:1])


def test_a_drafter_that_is_the_target_is_never_rejected() -> None:
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(50), 4), dtype=torch.float32)
    draft = Draft(torch.tensor([3, 4, 5]), (-1, 0, 1), (0, 3), ("toy",), (True,) * 3, Mass(p[:3], (0, 1, 2, -1)))
    verdict = REJECTION.verify(draft, p, Uniforms(torch.full((3,), 1 - 2.0**-53, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)))
    assert verdict.paths == ((0, 1, 2),)
    assert verdict.next_kinds == ("bonus",)


def test_nothing_proposed_draws_from_the_target() -> None:
    p = torch.eye(3)[[2, 0]]
    race = (torch.ones(1, 3), torch.ones(1, 3))
    for rule in RULES.values():
        verdict = rule.verify(empty_draft(2), p, Uniforms(torch.empty(0, dtype=torch.float64), torch.tensor([0.0, 0.9], dtype=torch.float64), race))
        assert verdict == Verdict(((), ()), ((), ()), (2, 0), ("bonus", "bonus"), ((), ()))
        assert rule.verify(empty_draft(0), p[:0], Uniforms(torch.empty(0), torch.empty(0))) == Verdict((), (), (), ())
    assert verify_batch(empty_draft(0), p[:0], Uniforms(torch.empty(0), torch.empty(0)), []) == Verdict((), (), (), ())


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_chain_rule_refuses_what_it_cannot_verify_exactly(name: str) -> None:
    p, rule = torch.full((3, 4), 0.25), RULES[name]
    assert not rule.takes_trees
    siblings = Draft(torch.tensor([0, 1]), (-1, -1), (0, 2), ("toy",))
    behind = Draft(torch.tensor([0, 1, 1]), (-1, -1, -1), (0, 1, 3), ("toy", "toy"))
    for draft in (siblings, behind):
        with pytest.raises(AssertionError, match="several children"):
            rule.verify(draft, torch.full((5, 4), 0.25), Uniforms(torch.zeros(3), torch.zeros(2)))
        with pytest.raises(AssertionError, match="several children"):
            rule.accept_probabilities(draft, torch.full((5, 4), 0.25))
    law_beside_point = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (False,), Mass(p[:1], (0, -1)))
    law_missing = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (True,), Mass(p[:1], (-1, -1)))
    for draft in (law_beside_point, law_missing):
        with pytest.raises(AssertionError, match="exactly when"):
            rule.accept_probabilities(draft, p[:2])
        with pytest.raises(AssertionError, match="exactly when"):
            rule.verify(draft, p[:2], Uniforms(torch.zeros(1), torch.zeros(1)))


def _walk(tokens: Sequence[int], parents: Sequence[int], best: Sequence[int]) -> tuple[int, ...]:
    """Longest path of a tree that says the argmax everywhere, by brute force."""
    paths: list[tuple[int, ...]] = [()]
    for path in paths:
        tip = path[-1] if path else -1
        paths += [(*path, node) for node, parent in enumerate(parents) if parent == tip and tokens[node] == best[1 + tip]]
    return max(paths, key=len)


@QUICK
@given(st.integers(0, 2**32))
def test_greedy_walks_any_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, size=rng.integers(1, 5))
    offsets = (0, *np.cumsum(lengths).tolist())
    parents = [int(rng.integers(-1, node)) for length in lengths for node in range(length)]
    tokens = rng.integers(0, 2, size=offsets[-1])
    draft = Draft(torch.tensor(tokens), tuple(parents), offsets, ("toy",) * len(lengths))
    probs = torch.empty(draft.num_rows, 2)
    for b, length in enumerate(lengths):
        texts: dict[int, tuple[int, ...]] = {-1: ()}
        for node in range(-1, length):
            if node >= 0:
                texts[node] = (*texts[parents[offsets[b] + node]], int(tokens[offsets[b] + node]))
            law = np.random.default_rng([seed, b, *texts[node]]).integers(0, 3, size=2)  # ties are common: the lowest id counts
            probs[draft.anchor_row(b) + 1 + node] = torch.tensor(law)
    verdict = GREEDY.verify(draft, probs, Uniforms(torch.zeros(draft.num_nodes), torch.zeros(draft.num_requests)))
    accept = GREEDY.accept_probabilities(draft, probs)
    for b, length in enumerate(lengths):
        start, anchor = offsets[b], draft.anchor_row(b)
        own = probs[anchor : anchor + length + 1].tolist()
        best = [row.index(max(row)) for row in own]
        path = _walk(tokens[start : start + length].tolist(), parents[start : start + length], best)
        assert verdict.accepted[b] == tuple(int(tokens[start + node]) for node in path)
        assert all(accept[start + node] == 1 for node in verdict.paths[b])
        tip = verdict.paths[b][-1] if path else -1
        assert verdict.next_tokens[b] == best[1 + tip]
        assert verdict.next_kinds[b] == ("residual" if tip in parents[start : start + length] else "bonus")
        assert GREEDY.next_law(draft, probs, [anchor + 1 + tip])[0, best[1 + tip]] == 1


@QUICK
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=8), st.floats(0, 1, exclude_max=True))
def test_draw_never_takes_a_token_without_weight(weights: list[float], u: float) -> None:
    if sum(weights) == 0:
        weights[-1] = 1.0
    for dtype in (torch.float32, torch.float64):
        for number in (u, 0.0, 1 - 2.0**-53):
            token = int(draw(torch.tensor([weights], dtype=dtype), torch.tensor([number], dtype=torch.float64)))
            assert weights[token] > 0
            assert sum(weights[:token]) <= number * sum(weights) + 1e-6
            assert number * sum(weights) <= sum(weights[: token + 1]) + 1e-6


def test_draw_gives_each_token_a_half_open_interval() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0]]).expand(5, -1)
    u = torch.tensor([0.0, 0.25 - 2.0**-54, 0.25, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, u).tolist() == [1, 1, 3, 4, 4]


def test_draw_survives_a_prefix_sum_that_is_not_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel prefix sum may rise at a token of weight zero, or fall at the end, in its last bits."""
    sums = torch.tensor([[0.5, 0.5 + 2.0**-50, 1.0, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: sums)
    assert draw(torch.tensor([[0.5, 0.0, 0.5, 0.0]]), torch.tensor([0.5], dtype=torch.float64)).tolist() == [2]


def test_a_token_without_mass_is_decided_by_the_target_alone() -> None:
    laws = torch.tensor([[0.0, 0.0, 1.0]])
    p = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    for token, expected in ((0, 1.0), (1, 0.0)):
        draft = Draft(torch.tensor([token]), (-1,), (0, 1), ("toy",), (True,), Mass(laws, (0, -1)))
        assert REJECTION.accept_probabilities(draft, p).tolist() == [expected]


def test_draw_takes_the_last_token_with_weight_when_the_number_is_too_large() -> None:
    weights = torch.tensor([[0.2, 0.8, 0.0], [0.0, 0.0, 0.0]])
    assert draw(weights, torch.tensor([1.0, 0.3], dtype=torch.float64)).tolist()[0] == 1
    assert 0 <= int(draw(weights, torch.tensor([1.0, 0.3], dtype=torch.float64))[1]) < 3


@pytest.mark.parametrize(
    ("name", "greedy", "seeded", "expected"),
    [
        ("auto", True, False, "greedy"),
        ("auto", True, True, "greedy"),
        ("auto", False, True, "coupled"),
        ("auto", False, False, "auto"),
        ("greedy", True, False, "greedy"),
        *[(name, greedy, seeded, name) for name in ON_CHAINS for greedy in (True, False) for seeded in (True, False)],
    ],
)
def test_resolve(name: str, greedy: bool, seeded: bool, expected: str) -> None:
    assert resolve(name, greedy, seeded) == expected


@pytest.mark.parametrize(("name", "value"), [("greedy", "rule='greedy'"), ("typical", "rule='typical'"), ("nonsense", "rule='nonsense'")])
def test_resolve_refuses(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        resolve(name, greedy=False)
    assert caught.value.field == "rule"
    assert "auto" in caught.value.remedy


def test_a_lossy_rule_runs_only_where_it_was_allowed() -> None:
    assert resolve("typical", greedy=False, allow_lossy=True) == "typical"
    with pytest.raises(ConfigError, match="lossy"):
        resolve("typical", greedy=True, seeded=True)
    with pytest.raises(ConfigError, match="temperature"):
        resolve("greedy", greedy=False, allow_lossy=True)


def test_every_rule_says_what_it_is() -> None:
    assert all(rule.name == name for name, rule in RULES.items())
    assert [name for name in ("auto", *RULES) if is_lossless(name)] == ["auto", "greedy", "rejection", "block", "coupled", "tree", "traversal"]
    assert [name for name in ("auto", *RULES) if needs_race(name)] == ["coupled"]
    assert [name for name, rule in RULES.items() if not rule.takes_trees] == ["rejection", "block"]


def test_auto_is_settled_by_what_was_drafted() -> None:
    laws = torch.full((1, 4), 0.25)

    def draft(parents: tuple[int, ...], sampled: tuple[bool, ...], law_of_row: tuple[int, ...]) -> Draft:
        """Behind a request without guesses, so that its rows do not start at 0."""
        mass = Mass(laws, (-1, *law_of_row)) if any(law >= 0 for law in law_of_row) else None
        return Draft(torch.zeros(len(parents), dtype=torch.int64), parents, (0, 0, len(parents)), ("toy",) * 2, sampled if mass else (), mass)

    none = (False, False)
    assert rule_for(draft((), (), (-1,)), 1) == "rejection"
    assert rule_for(draft((-1, 0), none, (-1, -1, -1)), 1) == "rejection"
    assert rule_for(draft((-1, -1), none, (-1, -1, -1)), 1) == "tree"
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 1) == "block"
    assert rule_for(draft((), (), (0,)), 1) == "block"
    assert rule_for(draft((-1, 0), none, (-1, -1, 0)), 1) == "block"
    assert rule_for(draft((-1, 0), (False, False), (0, -1, -1)), 1) == "tree"  # a missing draw beside a deterministic child
    assert rule_for(draft((-1, 0), (False, True), (-1, 0, -1)), 0) == "rejection"
    unequal = Draft(torch.zeros(2, dtype=torch.int64), (-1, -1), (0, 2), ("toy",))
    assert rule_for(unequal, 0) == "tree"


# ---- typical


def test_typical_accepts_what_is_plausible() -> None:
    """Sure target: a token needs 0.3 exp(-H); unsure target: 0.09 is the most that is ever asked for."""
    law = torch.tensor([0.8, 0.1, 0.08, 0.02], dtype=torch.float64)
    flat = torch.full((4,), 0.25, dtype=torch.float64)
    entropy = -(law * law.log()).sum()
    assert 0.3 * torch.exp(-entropy) > 0.09
    for p, token, expected in ((law, 1, 1.0), (law, 2, 0.0), (flat, 2, 1.0)):
        draft = Draft(torch.tensor([token]), (-1,), (0, 1), ("toy",))
        assert RULES["typical"].accept_probabilities(draft, torch.stack((p, p))).tolist() == [expected]
    wide = torch.full((20,), 0.04, dtype=torch.float64)
    wide[0] = 1 - wide[1:].sum()  # 0.24, and 19 tokens of 0.04 < 0.09
    assert 0.3 * float(torch.exp((wide * wide.log()).sum())) < 0.04
    draft = Draft(torch.tensor([7]), (-1,), (0, 1), ("toy",))
    assert RULES["typical"].accept_probabilities(draft, torch.stack((wide, wide))).tolist() == [1.0]


@pytest.mark.parametrize("kind", ["fixed", "uneven", "siblings"])
def test_typical_takes_the_deepest_plausible_path(kind: str) -> None:
    target = RandomTables(3, seed=81)
    cases = cases_of(tree_drafter(kind, 2, RandomTables(3, seed=82), 83), {(): 1.0})
    assert check_decisions(RULES["typical"], cases, target) > 0
    for case in cases:
        deepest = max((len(text) for text in case.layout.texts if _plausible(target, text)), default=0)
        law = emitted_law(RULES["typical"], [replace(case, weight=1.0)], target)
        assert {len(text) - 1 for text in law} == {deepest}
    law = emitted_law(RULES["typical"], cases, target)
    assert max_error(complete(law, target, 3), joint(target, 3)) > 0.05


def _plausible(target: RandomTables, text: tuple[int, ...]) -> bool:
    """Whether every token of `text` passes the test where it stands."""
    for i, token in enumerate(text):
        p = target[text[:i]]
        if p[token] <= min(0.09, 0.3 * float(np.exp((p * np.log(p)).sum()))):
            return False
    return True
