"""Tokens against their distributions: error rates as stated, planted errors seen, and the power that is promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from foretoken.engine.shadow import sequential_test, tails
from foretoken.engine.shadow.sequential_test import (
    DraftChildren,
    Evidence,
    GreedyEvidence,
    SequentialTest,
    distribution_tests,
    weigh,
    weigh_greedy,
)
from tests.helpers.usual import some_of

VOCAB = 24


def pairs(count: int, rng: np.random.Generator, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a target, its distributions, and distributions of a draft that is right in about six cases of ten: each
    `[count, VOCAB]`.
    """
    logits = torch.from_numpy(rng.standard_normal((count, VOCAB)) * scale)
    other = logits + torch.from_numpy(rng.standard_normal((count, VOCAB)) * scale * 0.7)
    return logits, logits.softmax(-1), other.softmax(-1)


def drawn(distributions: Tensor, rng: np.random.Generator) -> Tensor:
    sums = distributions.cumsum(-1)
    points = torch.from_numpy(rng.random((len(distributions), 1))) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp(max=distributions.shape[-1] - 1)


def children_of(distributions: Tensor, likeliest: int = VOCAB) -> list[DraftChildren]:
    best = distributions.topk(likeliest)
    return [
        DraftChildren(tuple(ids), tuple(mass))
        for ids, mass in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def judge(distributions: Tensor, draft: Tensor | None, emitted: Tensor, rng: np.random.Generator) -> Evidence:
    """Evidence of one token per row, drawn from `emitted`."""
    return weigh(
        distributions, drawn(emitted, rng), rng.random(len(distributions)), () if draft is None else children_of(draft)
    )


# ---- the scores


def test_moments_by_hand() -> None:
    distribution = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    found = weigh(distribution, torch.tensor([2]), np.array([0.5]), [DraftChildren((2, 3), (0.5, 0.5))])
    two = math.log(2)  # surprisals: two / 2 below and above their mean of 1.5 two
    assert found.surprisal.excess == pytest.approx(0.5 * two)
    assert found.surprisal.variance == pytest.approx((0.5 * two) ** 2)
    assert found.surprisal.third == pytest.approx(0)
    assert found.surprisal.distance == pytest.approx(0.5 * 0.5 * two)
    # scores of the draft tokens -1, -1, (0.5 - 0.25) / 0.5, 1 with mean -0.625
    assert found.draft.excess == pytest.approx(0.5 + 0.625)
    assert found.draft.variance == pytest.approx(0.75 * 0.375**2 + 0.25 * 1.125**2)
    assert found.draft.distance == pytest.approx(0.75)
    assert found.draft.shift == pytest.approx(0.5 + 0.25 + 0.25 * 0.5 + 0.5)
    # half of the third quarter of the ranks: 0.75 + 0.5 * 0.25
    assert found.ranks.nonzero()[0].tolist() == [int(0.875 * sequential_test.NUM_BINS)]


def test_ranks_are_uniform_whatever_the_distribution() -> None:
    """Every token with its weight and noise at the middle of 100 steps: exactly flat."""
    distribution = torch.tensor([[0.15, 0.4, 0.15, 0.3]], dtype=torch.float64)
    counts = np.zeros(sequential_test.NUM_BINS)
    for token in range(4):
        for step in range(100):
            counts += (
                float(distribution[0, token])
                / 100
                * weigh(distribution, torch.tensor([token]), np.array([(step + 0.5) / 100])).ranks
            )
    np.testing.assert_allclose(counts, 1 / sequential_test.NUM_BINS, atol=0.004)


def test_evidence_adds_up_and_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    _, distributions, draft = pairs(40, rng)
    tokens, noise, drafts = (
        drawn(distributions, rng),
        rng.random(40),
        [g if i % 3 else None for i, g in enumerate(children_of(draft))],
    )
    whole = weigh(distributions, tokens, noise, drafts)
    parts = weigh(distributions[:7], tokens[:7], noise[:7], drafts[:7]) + weigh(
        distributions[7:], tokens[7:], noise[7:], drafts[7:]
    )
    monkeypatch.setattr(sequential_test, "_BLOCK", 3 * VOCAB)
    for other in (parts, weigh(distributions, tokens, noise, drafts)):
        assert (other.num_tokens, other.draft.num_tokens) == (40, 26)
        np.testing.assert_array_equal(other.ranks, whole.ranks)
        np.testing.assert_allclose(other.bets, whole.bets)
        assert distribution_tests(other, 0.01)[2].p_value == pytest.approx(distribution_tests(whole, 0.01)[2].p_value)


def test_an_impossible_token_is_seen_at_once_and_one_at_the_edge_is_not_held_against_anybody() -> None:
    distributions = torch.tensor([[0.6, 0.4, 0.0]] * 2, dtype=torch.float64)
    found = weigh(distributions, torch.tensor([2, 2]), np.array([0.1, 0.9]), edges=torch.tensor([False, True]))
    assert (found.num_impossible, found.num_edges, found.surprisal.excess) == (1, 1, 0)
    monitor = SequentialTest(1e-6)
    monitor.add(weigh(distributions, torch.tensor([2, 0]), np.array([0.1, 0.9]), edges=torch.tensor([True, True])))
    assert not monitor.alarm
    monitor.add(found)
    assert monitor.alarm
    assert monitor.e_value == math.inf


def test_temperature_zero_is_exact() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.9], [0.0, 5.0, 5.0], [0.0, 5.0, 5.0], [9.0, 0.0, 1.0]])
    tolerance = torch.full((4,), 0.25)
    found = weigh_greedy(logits, torch.tensor([2, 1, 2, 1]), tolerance)
    assert found == GreedyEvidence(4, num_other=3, num_beyond=1, max_gap=9.0)
    assert found + GreedyEvidence(1, 1, 1, 10.0) == GreedyEvidence(5, 4, 2, 10.0)


# ---- error rates

CASES = [
    (0.5, 400),
    (2.0, 400),
    (6.0, 400),
    (10.0, 800),
]  # spread of the logits: from nearly flat distributions to nearly points


@pytest.mark.parametrize(("scale", "count"), CASES)
def test_false_alarms_are_as_rare_as_stated(scale: float, count: int) -> None:
    """150 streams that follow their distributions: p-values below 0.1 and 0.02 are as frequent as that, also where
    distributions are nearly points.
    """
    rng = np.random.default_rng(int(10 * scale))
    _, distributions, draft = pairs(count, rng, scale)
    drafts, runs = children_of(draft, 4), 150
    p_values = np.array(
        [
            [
                test.p_value
                for test in distribution_tests(
                    weigh(distributions, drawn(distributions, rng), rng.random(count), drafts), 1e-4
                )
            ]
            for _ in range(runs)
        ]
    )
    for level in (0.1, 0.02):
        seen = (p_values < level).sum(0)
        assert (seen <= stats.binom.isf(1e-4, runs, level)).all(), (level, seen)
    assert (p_values.mean(0) < 0.6).all()  # a test that never rejects would pass the above


@pytest.mark.parametrize("mean", [2, 4, 8, 30, 200])
def test_tails_of_rare_events_are_never_too_short(mean: float) -> None:
    """A sum of rare events is skewed: the normal distribution would raise many times the false alarms at 1e-5. Exact,
    by the binomial distribution.
    """
    count = 100_000
    chance = mean / count
    deviation = math.sqrt(count * chance * (1 - chance))
    events = np.arange(int(mean + 25 * deviation))
    weights = stats.binom.pmf(events, count, chance)
    z, skew = (events - mean) / deviation, (1 - 2 * chance) / deviation
    p_values = np.array([min(1.0, 2 * min(tails.upper_tail(x, skew), tails.upper_tail(-x, -skew))) for x in z])
    for level in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        assert weights[p_values < level].sum() <= level
    if mean < 10:
        assert weights[2 * stats.norm.sf(abs(z)) < 1e-5].sum() > 5e-5


def test_tails_equal_scipys() -> None:
    for z in (0.0, 1.0, 3.0, 6.0):
        assert tails.upper_tail(z, 0.0) == pytest.approx(stats.norm.sf(z))
        assert tails.upper_tail(z, 0.5) == pytest.approx(stats.pearson3.sf(z, 0.5))
        assert tails.chi2_tail(10 * z, 19) == pytest.approx(stats.chi2.sf(10 * z, 19))
    assert tails.upper_tail(-9.0, 0.5) == 1
    shift = tails.noncentrality(19, 1e-4, sequential_test._POWER)
    assert stats.ncx2.sf(stats.chi2.isf(1e-4, 19), 19, shift) == pytest.approx(0.99, abs=1e-6)


def test_the_monitor_may_be_looked_at_for_ever() -> None:
    """250 streams of 400 tokens that follow their distributions, looked at after every second token: at most one in ten
    ever reaches 10.
    """
    rng = np.random.default_rng(3)
    count, runs, reached, ends = 200, 250, 0, []
    _, distributions, draft = pairs(2, rng, 4.0)
    drafts = children_of(draft)
    kinds = {
        (a, b): weigh(distributions, torch.tensor([a, b]), np.array([(step + 0.5) / 5] * 2), drafts).bets
        for a in range(VOCAB)
        for b in range(VOCAB)
        for step in range(5)
        if step == 2
    }
    for _ in range(runs):
        monitor = SequentialTest(0.1)
        first, second = (
            drawn(distributions[:1].expand(count, -1), rng).tolist(),
            drawn(distributions[1:].expand(count, -1), rng).tolist(),
        )
        for pair in zip(first, second, strict=True):
            monitor.add(Evidence(2, bets=kinds[pair] * np.array([[1], [1], [0], [0]])))
        reached += monitor.alarm
        ends.append(monitor.e_value)
    assert reached <= stats.binom.isf(1e-4, runs, 0.1)
    assert np.mean(ends) < 1 + 4 * np.std(ends) / math.sqrt(runs)


def test_bets_on_ranks_are_fair() -> None:
    """Over all noise the cosines are worth nothing on average."""
    distribution = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    noise = (np.arange(1000) + 0.5) / 1000
    worth = np.mean([np.exp(weigh(distribution, torch.tensor([0]), np.array([x])).bets) for x in noise], axis=0)
    np.testing.assert_allclose(worth, 1, atol=1e-9)


def test_slack_makes_rounding_harmless() -> None:
    """Distributions computed with other rounding: noise of 0.3 in every logit leads the plain monitor astray, not the
    one that allows for it.
    """
    rng = np.random.default_rng(5)
    logits, distributions, _ = pairs(60_000, rng)
    rounded = (logits + 0.3 * torch.from_numpy(rng.standard_normal(logits.shape))).softmax(-1)
    tokens, noise = drawn(distributions, rng), rng.random(len(distributions))
    plain, allowing = (weigh(rounded, tokens, noise, slack=slack).bets for slack in (0.0, 0.03))
    assert allowing.max() < 0 < 10 < plain.max()


# ---- planted errors


def emitted_distribution(
    p: Tensor, q: Tensor, declared: Tensor | None = None, factor: float = 1.0, residual_is_target: bool = False
) -> Tensor:
    """What token-level rejection emits when it is wrong: `[n, V]`. Drawn from q; tested with `factor * declared`."""
    mu = q if declared is None else declared
    kept = q * (p / (factor * mu)).clamp(max=1)
    rest = p if residual_is_target else (p - mu).clamp(min=0)
    return kept + (1 - kept.sum(-1, keepdim=True)) * rest / rest.sum(-1, keepdim=True)


def test_the_planted_law_is_right_when_nothing_is_planted() -> None:
    _, p, q = pairs(50, np.random.default_rng(0))
    torch.testing.assert_close(emitted_distribution(p, q), p)


ERRORS = {
    "residual is the target": lambda logits, p, q: emitted_distribution(p, q, residual_is_target=True),
    "tested with 0.8 q": lambda logits, p, q: emitted_distribution(p, q, factor=0.8),
    "tested with 1.25 q": lambda logits, p, q: emitted_distribution(p, q, factor=1.25),
    "tested with another distribution than drawn from": lambda logits, p, q: emitted_distribution(
        p, q, declared=q.roll(1, 0)
    ),
    "every draft token accepted": lambda logits, p, q: q,
    "temperature off by 5 %": lambda logits, p, q: (logits / 1.05).softmax(-1),
    "temperature off by 10 %": lambda logits, p, q: (logits / 1.1).softmax(-1),
}
# (tokens for the tests at 1e-4, tokens for the monitor at 1e-6); the weaker temperature takes 6.5 / 0.05 squared over
# the variance
NEEDED = {
    "temperature off by 5 %": (20_000, 40_000),
    "temperature off by 10 %": (6_000, 12_000),
    "tested with 1.25 q": (2_000, 4_000),
}


@pytest.mark.parametrize("error", ERRORS)
def test_planted_errors_are_seen(error: str) -> None:
    few, many = NEEDED.get(error, (2_000, 3_000))
    rng = np.random.default_rng(11)
    logits, p, q = pairs(many, rng)
    tokens, noise, drafts = drawn(ERRORS[error](logits, p, q), rng), rng.random(many), children_of(q)
    first, rest = (weigh(p[part], tokens[part], noise[part], drafts[part]) for part in (slice(few), slice(few, many)))
    failed = {test.name for test in distribution_tests(first, 1e-4) if not test.passed}
    assert ("surprisal" if "temperature" in error else "draft") in failed
    monitor = SequentialTest(1e-6)
    monitor.add(first)
    monitor.add(rest)
    assert monitor.alarm


def test_only_the_draft_shows_a_wrong_residual() -> None:
    """The reason for that score: sharpness and ranks of the tokens stay what they were."""
    rng = np.random.default_rng(2)
    _, p, q = pairs(4_000, rng)
    wrong = emitted_distribution(p, q, residual_is_target=True)
    assert float((wrong - p).abs().sum(-1).mean()) / 2 > 0.1
    surprisal, rank, draft = distribution_tests(judge(p, q, wrong, rng), 1e-4)
    assert (surprisal.passed, rank.passed, draft.passed) == (True, True, False)


def test_a_filter_left_out_is_seen_at_once() -> None:
    rng = np.random.default_rng(1)
    _, p, _ = pairs(100, rng)
    ordered, ids = p.sort(-1, descending=True)
    kept = torch.zeros_like(p).scatter_(-1, ids, ordered * (ordered.cumsum(-1) - ordered < 0.9))
    assert judge(kept / kept.sum(-1, keepdim=True), None, p, rng).num_impossible > 3


# ---- what is promised


@pytest.mark.parametrize("name", some_of(["surprisal", "draft"], {"surprisal"}))
def test_the_smallest_error_that_is_promised_is_really_seen(name: str) -> None:
    """An error of exactly the stated size is found in 99 of 100 streams, as is said; half of it is not."""
    rng = np.random.default_rng(9)
    logits, p, q = pairs(800, rng)
    drafts = children_of(q)
    level = 1e-3
    promised = next(test for test in distribution_tests(judge(p, q, p, rng), level) if test.name == name)
    size = float(promised.sees.split("%")[0].split()[-1]) / 100

    def share_found(size: float) -> float:
        wrong = (logits / (1 + size)).softmax(-1) if name == "surprisal" else (1 - size) * p + size * q
        assert float((wrong - p).abs().sum(-1).mean()) / 2 == pytest.approx(promised.smallest * size / full, rel=0.15)
        tests = [distribution_tests(weigh(p, drawn(wrong, rng), rng.random(len(p)), drafts), level) for _ in range(80)]
        return float(np.mean([not test.passed for found in tests for test in found if test.name == name]))

    full = size
    assert share_found(size) > 0.93
    assert share_found(size / 2) < 0.6


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_sharper_distribution_is_seen_as_promised_by_few_tokens(scale: float) -> None:
    """A sharper distribution has less variance, so that the surprisal moves less than in proportion to a large error:
    of the error that a proportion would promise with the scale of 2.5, 76 of 100 are found.
    """
    logits = scale * torch.randn(150, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    distributions = logits.softmax(-1)
    generator = torch.Generator().manual_seed(4)

    def sharpness(error: float) -> sequential_test.DistributionTest:
        tokens = ((1 + error) * logits).softmax(-1).multinomial(1, generator=generator)[:, 0]
        return distribution_tests(weigh(distributions, tokens, np.full(150, 0.5)), 1e-4)[0]

    sees = sharpness(0.0).sees
    if not sees.startswith("a temperature off by "):
        assert sees == "little: more tokens are needed"
        return
    error = float(sees.removeprefix("a temperature off by ").partition("%")[0]) / 100
    assert sum(not sharpness(error).passed for _ in range(100)) >= 97


def test_the_rank_test_sees_what_it_promises() -> None:
    """Mass moved between two bins of ranks, in the least visible way: evenly over all bins."""
    rng = np.random.default_rng(4)
    count, level = 2_000, 1e-3
    promised = sequential_test._rank_test(np.full(sequential_test.NUM_BINS, count // sequential_test.NUM_BINS), level)
    tilt = 2 * promised.smallest / sequential_test.NUM_BINS * (-1.0) ** np.arange(sequential_test.NUM_BINS)
    found = [
        sequential_test._rank_test(rng.multinomial(count, 1 / sequential_test.NUM_BINS + tilt), level)
        for _ in range(200)
    ]
    assert np.mean([not test.passed for test in found]) > 0.95
    assert not any(
        test.passed is False
        for test in [
            sequential_test._rank_test(rng.multinomial(count, [1 / sequential_test.NUM_BINS] * 20), level)
            for _ in range(200)
        ]
    )


def test_too_few_tokens_are_no_verdict() -> None:
    rng = np.random.default_rng(0)
    _, p, _ = pairs(20, rng)
    tests = distribution_tests(judge(p, None, p, rng), 1e-4)
    assert [test.name for test in tests if not test.conclusive] == ["rank"]
    point = torch.eye(4, dtype=torch.float64)
    nothing = distribution_tests(weigh(point, torch.arange(4), rng.random(4)), 1e-4)
    assert not any(test.conclusive for test in nothing)
    assert all(test.passed for test in nothing)
    rare = torch.tensor([[0.999, 0.001]], dtype=torch.float64)
    surprisal = distribution_tests(weigh(rare, torch.tensor([1]), np.array([0.3])), 1e-4)[0]
    assert (surprisal.conclusive, surprisal.passed) == (False, True)


def test_one_level_for_all_tests() -> None:
    rng = np.random.default_rng(0)
    _, p, q = pairs(30, rng)
    assert [test.level for test in distribution_tests(judge(p, q, p, rng), 3e-4)] == pytest.approx([1e-4] * 3)
    assert [test.level for test in distribution_tests(judge(p, None, p, rng), 3e-4)] == [1.5e-4] * 2
