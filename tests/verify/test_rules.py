"""Single cases: the draw from weights, rounding at the edges, refusals, greedy on trees."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core import Draft, Mass, Uniforms, Verdict, empty_draft
from foretoken.verify import RULES, draw, verify_batch
from foretoken.verify.base import take
from foretoken.verify.siblings import Residuals
from tests.verify.batches import QUICK

REJECTION, GREEDY = RULES["rejection"], RULES["greedy"]


@pytest.mark.parametrize(
    ("rule", "tree"), [("rejection", False), ("block", False), ("tree", False), ("tree", True), ("traversal", True)]
)
def test_float32_is_as_good_as_float64_on_a_wide_vocabulary(rule: str, tree: bool) -> None:
    """Probabilities of every branch to 1e-5, distributions from a softmax over 8000 tokens."""
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(9, 8000)) * 3
    q = np.exp(logits + rng.normal(size=logits.shape))
    q /= q.sum(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tokens = [int(rng.choice(8000, p=q[i])) for i in range(8)]
    parents = (-1, -1, 0, 0, 2, 2, 4, 4) if tree else tuple(range(-1, 7))
    sampled = (True, False, True, True, True, False, True, True) if tree else (True,) * 8
    distribution_of_row = tuple(i if i - 1 in parents else -1 for i in range(9))
    found = []
    for dtype in (torch.float64, torch.float32):
        draft = Draft(
            torch.tensor(tokens),
            parents,
            (0, 8),
            ("toy",),
            sampled,
            Mass(torch.tensor(q, dtype=dtype), distribution_of_row),
        )
        probs = torch.tensor(p, dtype=dtype)
        weights = RULES[rule].next_token_weights(draft, probs, range(9)).double()
        found.append((RULES[rule].accept_probabilities(draft, probs).double(), weights / weights.sum(-1, keepdim=True)))
    assert torch.allclose(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert (found[0][1] - found[1][1]).abs().sum(-1).max() < 1e-4


def test_a_float32_probability_just_above_one_stays_harmless() -> None:
    """The second draft token is certain up to rounding, and its prefix nearly so: nothing is left to stop at it."""
    above = np.nextafter(np.float32(1), np.float32(2))
    p = torch.tensor([[1 - 1.5e-7, 1.5e-7], [above, 0.0], [0.5, 0.5]], dtype=torch.float32)
    draft = Draft(torch.tensor([0, 0]), (-1, 0), (0, 2), ("toy",))
    for name in ("rejection", "block", "tree", "traversal"):
        accept = RULES[name].accept_probabilities(draft, p)
        assert ((accept >= 0) & (accept <= 1)).all()
        assert accept.tolist() == pytest.approx([1, 1], abs=1e-6)
        verdict = RULES[name].verify(draft, p, Uniforms(torch.tensor([0.9, 0.9]), torch.tensor([0.9])))
        assert all(0 <= value <= 1 for value in verdict.probabilities[0])


def test_the_law_of_a_later_sibling_is_exact_to_the_last_bit() -> None:
    """Of 100 001 tokens in float32, without the first draw, scaled back by a ratio of float64 sums."""
    rng = np.random.default_rng(12)
    for _ in range(4):
        distribution = rng.dirichlet(np.full(100_001, 0.5)).astype(np.float32)
        first, second = (int(token) for token in np.argsort(-distribution)[:2])
        mass = Mass(torch.tensor(distribution[None]), (0, -1, -1))
        draft = Draft(torch.tensor([first, second]), (-1, -1), (0, 2), ("toy",), (True, True), mass)
        rest = distribution.astype(np.float64)
        rest[first] = 0
        expected = np.float32(distribution[second] * (distribution.astype(np.float64).sum() / rest.sum()))
        assert Residuals(draft, torch.tensor(distribution).expand(3, -1)).mass == [
            float(distribution[first]),
            float(expected),
        ]


def test_what_follows_equal_draft_tokens_is_judged_together() -> None:
    """Both draws below a draft token given twice are judged, the second one against what the first left; the walk
    reports its own nodes.
    """
    p, distributions = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64),
    )
    draft = Draft(
        torch.tensor([0, 0, 1, 2]),
        (-1, -1, 0, 1),
        (0, 4),
        ("toy",),
        (False, False, True, True),
        Mass(distributions, (-1, 0, 1, -1, -1)),
    )
    probs = p.expand(5, -1)
    left = (p - distributions[0]).clamp(min=0) / (p - distributions[0]).clamp(min=0).sum()
    expected = [0.5, 0.0, 0.375, 0.625 * float(left[2] / distributions[1, 2])]
    assert RULES["tree"].accept_probabilities(draft, probs).tolist() == pytest.approx(expected)
    verdict = RULES["tree"].verify(draft, probs, Uniforms(torch.tensor([0.4, 0.4, 0.9, 0.0]), torch.tensor([0.5])))
    assert verdict.paths == ((1, 3),)
    assert verdict.accepted == ((0, 2),)
    nothing = RULES["tree"].verify(draft, probs, Uniforms(torch.tensor([0.4, 0.4, 0.9, 0.9]), torch.tensor([0.5])))
    assert nothing.paths == ((0,),)
    assert nothing.next_kinds == ("residual",)


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_sums_over_the_vocabulary_are_taken_in_float64(rule: str) -> None:
    """What is left of float32 distributions over 100 001 tokens is summed without a rounding error of its own."""
    rng = np.random.default_rng(11)
    p, mu = (rng.dirichlet(np.full(100_001, 0.5)).astype(np.float32) for _ in range(2))
    mu *= np.float32(0.7)
    token = int(np.argmax(mu))
    draft = Draft(
        torch.tensor([token]), (-1,), (0, 1), ("toy",), (True,), Mass(torch.tensor(np.stack([mu, mu])), (0, 1))
    )
    verdict = RULES[rule].verify(
        draft, torch.tensor(np.stack([p, p])), Uniforms(torch.zeros(1, dtype=torch.float64), torch.zeros(1))
    )
    reach = min(1.0, float(p[token]) / float(mu[token]))
    assert 0.01 < reach < 0.99
    left = np.maximum(np.float32(reach) * p - mu, 0).astype(np.float64).sum()
    assert verdict.probabilities[0][0] == pytest.approx(left / (left + 1 - reach), rel=1e-9)


@pytest.mark.parametrize("rest", [1e-40, 0.0])
def test_a_residual_too_small_to_divide_by_is_nothing(rest: float) -> None:
    """After the first of two draws next to nothing is left, and its inverse is no float32: what was owed before
    stays.
    """
    distribution, p = (
        torch.tensor([[0.5, 0.25, 0.25, 0.0]]),
        torch.tensor([[0.5, 0.25, 0.25, rest]]).expand(4, -1).contiguous(),
    )
    draft = Draft(
        torch.tensor([0, 1, 3]),
        (-1, -1, -1),
        (0, 3),
        ("toy",),
        (True, True, False),
        Mass(distribution, (0, -1, -1, -1)),
    )
    for rule in (RULES["tree"], RULES["traversal"]):
        assert rule.accept_probabilities(draft, p).tolist() == [1.0, 0.0, 0.0]
        assert bool(torch.isfinite(rule.next_token_weights(draft, p, [0, 1, 2])).all())
    for bottom_up in (False, True):
        residuals = Residuals(draft, p)
        residuals.judge(bottom_up)
        assert residuals.step == {0: 1.0, 1: 0.5, 2: pytest.approx(rest, abs=1e-39)}


def test_a_later_sibling_outside_its_law_is_decided_by_the_target_alone() -> None:
    """Against the contract: the first draw took all of the distribution."""
    distribution, p = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]]).expand(3, -1).contiguous()
    draft = Draft(torch.tensor([0, 1]), (-1, -1), (0, 2), ("toy",), (True, True), Mass(distribution, (0, -1, -1)))
    for rule in (RULES["tree"], RULES["traversal"]):
        assert rule.accept_probabilities(draft, p).tolist() == [0.25, 0.75]
        weights = rule.next_token_weights(draft, p, [0])[
            0
        ]  # what the first draw left; the second one takes nothing off it
        assert (weights / weights.sum()).tolist() == pytest.approx([0, 2 / 3, 1 / 3])


def test_the_whole_batch_has_a_rule_each() -> None:
    with pytest.raises(AssertionError):
        verify_batch(empty_draft(2), torch.eye(3)[[0, 1]], Uniforms(torch.empty(0), torch.zeros(2)), ["rejection"])


def test_zero_residual_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    draft = Draft(torch.tensor([0]), (-1,), (0, 1), ("toy",), (True,), Mass(p[:1].clone(), (0, -1)))
    assert torch.equal(REJECTION.next_token_weights(draft, p, [0]), p[:1])


def test_a_drafter_that_is_the_target_is_never_rejected() -> None:
    p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(50), 4), dtype=torch.float32)
    draft = Draft(torch.tensor([3, 4, 5]), (-1, 0, 1), (0, 3), ("toy",), (True,) * 3, Mass(p[:3], (0, 1, 2, -1)))
    verdict = REJECTION.verify(
        draft,
        p,
        Uniforms(torch.full((3,), 1 - 2.0**-53, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)),
    )
    assert verdict.paths == ((0, 1, 2),)
    assert verdict.next_kinds == ("bonus",)


def test_nothing_proposed_draws_from_the_target() -> None:
    p = torch.eye(3)[[2, 0]]
    race = (torch.ones(1, 3), torch.ones(1, 3))
    for rule in RULES.values():
        verdict = rule.verify(
            empty_draft(2),
            p,
            Uniforms(torch.empty(0, dtype=torch.float64), torch.tensor([0.0, 0.9], dtype=torch.float64), race),
        )
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
        if name == "block":
            with pytest.raises(AssertionError, match="several children"):
                rule.next_token_weights(draft, torch.full((5, 4), 0.25), [0])
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
        paths += [
            (*path, node) for node, parent in enumerate(parents) if parent == tip and tokens[node] == best[1 + tip]
        ]
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
            distribution = np.random.default_rng([seed, b, *texts[node]]).integers(
                0, 3, size=2
            )  # ties are common: the lowest id counts
            probs[draft.anchor_row(b) + 1 + node] = torch.tensor(distribution)
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
        assert GREEDY.next_token_weights(draft, probs, [anchor + 1 + tip])[0, best[1 + tip]] == 1


@QUICK
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 0.5, 1.0, 3.0]), min_size=1, max_size=8),
    st.floats(0, 1, exclude_max=True),
)
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


def test_draw_sums_in_float64() -> None:
    """A hundred thousand float32 weights of 1e-9 behind a weight of 1: each on its own is lost in a float32 sum."""
    weights = torch.full((1, 100_001), 1e-9)
    weights[0, 0] = 1.0
    assert abs(int(draw(weights, torch.tensor([1 - 5e-5], dtype=torch.float64))) - 50_000) < 10
    assert int(draw(torch.tensor([[1.0, 2.0**-40]]), torch.tensor([1 - 2.0**-42], dtype=torch.float64))) == 1


def test_draw_survives_a_prefix_sum_that_is_not_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parallel prefix sum may rise at a token of weight zero, or fall at the end, in its last bits."""
    sums = torch.tensor([[0.5, 0.5 + 2.0**-50, 1.0, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: sums)
    assert draw(torch.tensor([[0.5, 0.0, 0.5, 0.0]]), torch.tensor([0.5], dtype=torch.float64)).tolist() == [2]


def test_a_token_without_mass_is_decided_by_the_target_alone() -> None:
    distributions = torch.tensor([[0.0, 0.0, 1.0]])
    p = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    for token, expected in ((0, 1.0), (1, 0.0)):
        draft = Draft(torch.tensor([token]), (-1,), (0, 1), ("toy",), (True,), Mass(distributions, (0, -1)))
        assert REJECTION.accept_probabilities(draft, p).tolist() == [expected]


def test_draw_takes_the_last_token_with_weight_when_the_number_is_too_large() -> None:
    weights = torch.tensor([[0.2, 0.8, 0.0], [0.0, 0.0, 0.0]])
    assert draw(weights, torch.tensor([1.0, 0.3], dtype=torch.float64)).tolist()[0] == 1
    assert 0 <= int(draw(weights, torch.tensor([1.0, 0.3], dtype=torch.float64))[1]) < 3


def test_draws_beyond_the_end_change_no_other_row() -> None:
    """A number that was rounded to 1 takes the row's last token with weight; the other rows are drawn as ever."""
    weights = torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    assert draw(weights, torch.tensor([1.0, 0.3, 1.0, 0.5], dtype=torch.float64)).tolist() == [1, 0, 0, 2]


def test_consecutive_rows_are_taken_without_a_copy() -> None:
    matrix = torch.arange(12.0).view(4, 3)
    for rows in ((1, 2), (0, 1, 2, 3), (3,)):
        found = take(matrix, rows)
        assert found.tolist() == matrix[list(rows)].tolist()
        assert found.data_ptr() == matrix[rows[0]].data_ptr()
    for rows in ((2, 1), (0, 2), (1, 1)):
        assert take(matrix, rows).tolist() == matrix[list(rows)].tolist()
    assert take(matrix, ()).shape == (0, 3)
