"""Properties of the rules on random drafts, the draw from weights, the registry and batches that mix rules."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core import Draft, Mass, Uniforms, Verdict, empty_draft
from foretoken.errors import ConfigError
from foretoken.verify import RULES, draw, resolve, verify_batch
from tests.helpers.enumeration import Guess, draft_of, point

REJECTION, GREEDY = RULES["rejection"], RULES["greedy"]
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def random_law(rng: np.random.Generator, vocab: int, mass: float = 1.0) -> np.ndarray:
    """A law with holes, sometimes a point, sometimes flat."""
    shape = rng.integers(4)
    law = np.full(vocab, 1.0) if shape == 0 else rng.dirichlet(np.full(vocab, 0.3)) * (rng.random(vocab) > 0.4)
    if shape == 1 or law.sum() == 0:
        law = point(vocab, int(rng.integers(vocab)))
    return mass * law / law.sum()


def random_batch(seed: int) -> tuple[Draft, torch.Tensor, Uniforms]:
    """Chains of different lengths, kinds and masses, some with a law at the end where nothing was proposed."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(1, 7))
    chains = []
    for _ in range(rng.integers(1, 6)):
        chain = []
        for _ in range(rng.integers(0, 5)):
            mu = random_law(rng, vocab, float(rng.choice([1.0, 0.6])))
            chain.append(Guess(int(rng.choice(vocab, p=mu / mu.sum())), mu if rng.random() < 0.7 else None))
        if rng.random() < 0.4:
            chain.append(Guess(None, random_law(rng, vocab, float(rng.choice([1.0, 0.3])))))
        chains.append(tuple(chain))
    draft = draft_of(chains, vocab)
    target = np.array([random_law(rng, vocab) for _ in range(draft.num_rows)])
    if draft.mass is not None and rng.random() < 0.3:
        for row, law in enumerate(draft.mass.law_of_row):
            if law >= 0:  # the drafter is the target: nothing is left after a rejection but rounding
                target[row] = draft.mass.laws[law].numpy() / draft.mass.laws[law].numpy().sum()
    edge = rng.choice([0.0, 1 - 2.0**-53, 0.5], size=draft.num_nodes)
    accept = np.where(rng.random(draft.num_nodes) < 0.3, edge, rng.random(draft.num_nodes))
    following = np.where(rng.random(draft.num_requests) < 0.3, 1 - 2.0**-53, rng.random(draft.num_requests))
    dtype = torch.float32 if rng.random() < 0.5 else torch.float64
    if draft.mass is not None:
        draft = replace(draft, mass=Mass(draft.mass.laws.to(dtype), draft.mass.law_of_row))
    return draft, torch.tensor(target, dtype=dtype), Uniforms(torch.tensor(accept), torch.tensor(following))


def part(verdict: Verdict, b: int) -> tuple[object, ...]:
    return verdict.paths[b], verdict.accepted[b], verdict.next_tokens[b], verdict.next_kinds[b]


def alone(draft: Draft, probs: torch.Tensor, uniforms: Uniforms, b: int) -> tuple[Draft, torch.Tensor, Uniforms]:
    nodes = slice(draft.offsets[b], draft.offsets[b + 1])
    return draft.select([b]), probs[draft.rows_of([b])], Uniforms(uniforms.accept[nodes], uniforms.next[b : b + 1])


@QUICK
@given(st.integers(0, 2**32))
def test_what_is_emitted_is_possible_and_a_prefix_of_the_draft(seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    verdict = REJECTION.verify(draft, probs, uniforms)
    for b in range(draft.num_requests):
        kept = len(verdict.paths[b])
        own = draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist()
        assert verdict.paths[b] == tuple(range(kept))
        assert verdict.emitted(b) == (*own[:kept], verdict.next_tokens[b])
        assert all(probs[draft.anchor_row(b) + i, token] > 0 for i, token in enumerate(verdict.emitted(b)))


@QUICK
@given(st.integers(0, 2**32))
def test_branch_weights_are_never_nan(seed: int) -> None:
    draft, probs, _ = random_batch(seed)
    accept, weights = REJECTION.accept_probabilities(draft, probs), REJECTION.next_law(draft, probs, range(draft.num_rows))
    assert ((accept >= 0) & (accept <= 1)).all()
    assert (weights >= 0).all()
    assert (weights.sum(-1) > 0).all()


@QUICK
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("rule", [REJECTION, GREEDY], ids=lambda rule: rule.name)
def test_a_request_does_not_depend_on_its_neighbours(rule, seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    whole = rule.verify(draft, probs, uniforms)
    for b in range(draft.num_requests):
        assert part(whole, b) == part(rule.verify(*alone(draft, probs, uniforms, b)), 0)


@QUICK
@given(st.integers(0, 2**32))
def test_a_batch_that_mixes_rules_equals_each_request_alone(seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    rules = [str(name) for name in np.random.default_rng(seed).choice(["greedy", "rejection"], draft.num_requests)]
    whole = verify_batch(draft, probs, uniforms, rules)
    for b, rule in enumerate(rules):
        assert part(whole, b) == part(RULES[rule].verify(*alone(draft, probs, uniforms, b)), 0)


@QUICK
@given(st.integers(0, 2**32))
def test_rejection_at_temperature_zero_is_greedy(seed: int) -> None:
    draft, probs, uniforms = random_batch(seed)
    hot = torch.zeros_like(probs).scatter_(-1, probs.argmax(-1, keepdim=True), 1)
    assert REJECTION.verify(draft, hot, uniforms) == GREEDY.verify(draft, probs, uniforms)


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
    for rule in RULES.values():
        verdict = rule.verify(empty_draft(2), p, Uniforms(torch.empty(0, dtype=torch.float64), torch.tensor([0.0, 0.9], dtype=torch.float64)))
        assert verdict == Verdict(((), ()), ((), ()), (2, 0), ("bonus", "bonus"))
        assert verify_batch(empty_draft(0), p[:0], Uniforms(torch.empty(0), torch.empty(0)), []) == Verdict((), (), (), ())


def test_rejection_refuses_what_it_cannot_verify_exactly() -> None:
    p = torch.full((3, 4), 0.25)
    siblings = Draft(torch.tensor([0, 1]), (-1, -1), (0, 2), ("toy",))
    with pytest.raises(AssertionError, match="several children"):
        REJECTION.verify(siblings, p, Uniforms(torch.zeros(2), torch.zeros(1)))
    law_beside_point = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (False,), Mass(p[:1], (0, -1)))
    law_missing = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (True,), Mass(p[:1], (-1, -1)))
    for draft in (law_beside_point, law_missing):
        with pytest.raises(AssertionError, match="exactly when"):
            REJECTION.accept_probabilities(draft, p[:2])


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
    ("name", "greedy", "expected"),
    [("auto", True, "greedy"), ("auto", False, "rejection"), ("greedy", True, "greedy"), ("rejection", True, "rejection")],
)
def test_resolve(name: str, greedy: bool, expected: str) -> None:
    assert resolve(name, greedy) == expected


@pytest.mark.parametrize(("name", "value"), [("greedy", "rule='greedy'"), ("typical", "rule='typical'")])
def test_resolve_refuses(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=value) as caught:
        resolve(name, greedy=False)
    assert caught.value.field == "rule"
    assert "auto" in caught.value.remedy


def test_every_rule_says_what_it_is() -> None:
    assert all(rule.name == name and rule.lossless for name, rule in RULES.items())
