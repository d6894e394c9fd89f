"""Distributions equal to transformers' own filters, and a random source with published answers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.config import SamplingParams
from foretoken.core import Draft, empty_draft
from foretoken.kernels import sampling as compiled
from foretoken.text.randomness import Purpose, philox4x32, round_uniforms, uniforms
from foretoken.text.sampling import check_finite, near_ties_of, target_probs, top_two, without_broken
from foretoken.verify import draw

GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.3, 1.0, 1.7), (0, 1, 5, 10_000), (1.0, 0.9, 0.5, 1e-6), (0.0, 0.1, 1.0))
]


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernel, and as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "sampling_kernel", lambda: None)


def theirs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution by transformers' warpers in sequence."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [1, 7, 300, 3000])
def test_laws_equal_transformers(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator, dtype=dtype) * 3
    for params in GRID:
        ours, reference = target_probs(logits, [params] * 3), theirs(logits, params)
        assert ours.dtype == dtype
        assert torch.equal(ours > 0, reference > 0), params
        torch.testing.assert_close(ours, reference, rtol=1e-6 if dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [8, 2048])
def test_as_many_ties_are_kept_as_in_transformers(vocab: int) -> None:
    """Which of several equal tokens top_p drops is left open by transformers' unstable sort; here the lowest ids go."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-4, 4, (4, vocab), generator=generator).float() * 2
    logits[0, ::2] = -torch.inf
    for params in GRID:
        if params.top_p == 0.9:
            params = replace(params, top_p=0.8731)  # no whole number of tied tokens has exactly this mass
        ours, reference = target_probs(logits, [params] * 4), theirs(logits, params)
        torch.testing.assert_close(ours.sort().values, reference.sort().values, rtol=1e-5, atol=0)
        for row, distribution in zip(logits, ours, strict=True):
            least = row[distribution > 0].min()
            kept = distribution[row == least] > 0
            assert not (distribution[row > least] == 0).any()
            assert torch.equal(kept, kept.sort().values), params


@pytest.mark.usefixtures("way")
def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    logits = torch.randn(len(GRID) + 2, 1500, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(), *GRID, SamplingParams()]
    together = target_probs(logits, params)
    for row, one in enumerate(params):
        assert torch.equal(together[row], target_probs(logits[row : row + 1], [one])[0])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_have_the_same_bits_beside_a_request_with_processors(dtype: torch.dtype) -> None:
    """There all rows of a step come in float32: strict numerics promise the same log-probabilities."""
    logits = (3 * torch.randn(40, 104, generator=torch.Generator().manual_seed(4))).to(dtype)
    kinds = [SamplingParams(temperature=0.7), SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(top_k=7)]
    params = [kinds[row % len(kinds)] for row in range(len(logits))]
    assert torch.equal(target_probs(logits, params), target_probs(logits.float(), params))


def test_temperature_zero_is_a_point_at_the_lowest_of_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-torch.inf, -5.0, -7.0]], dtype=torch.bfloat16)
    distribution = target_probs(logits, [SamplingParams(top_p=0.5), SamplingParams(top_k=3)])
    assert distribution.dtype == torch.float32
    assert distribution.tolist() == [[0, 1, 0], [0, 1, 0]]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-12, 1e-7])
def test_a_nearly_zero_temperature_is_the_argmax(temperature: float) -> None:
    distribution = target_probs(
        torch.tensor([[3.0, 40.0, 39.9, -torch.inf]]), [SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)]
    )
    assert distribution.tolist() == [[0, 1, 0, 0]]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [1, 50, 3000])
def test_top_p_keeps_at_least_one_token(vocab: int) -> None:
    for logits in (torch.zeros(1, vocab), torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))):
        distribution = target_probs(logits, [SamplingParams(temperature=1.0, top_p=1e-20)])
        assert abs(float(distribution.sum()) - 1) < 1e-6
        assert float(distribution[0, logits[0] == logits.max()].sum()) > 0


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_ties_are_the_two_best_within_a_rounding_unit(dtype: torch.dtype) -> None:
    """Against a sort of every row, ties, masked tokens and a lone token among them; the logits stay as they were."""
    logits = torch.randn(4000, 60, generator=torch.Generator().manual_seed(4)).mul(3).to(dtype).float()
    logits[0, :] = -torch.inf
    logits[0, 7] = 2.0
    logits[1, 3] = logits[1, 9] = 50.0
    before, best = logits.clone(), logits.sort(dim=-1, descending=True).values[:, :2]
    expected = {row: a - b for row, (a, b) in enumerate(best.tolist()) if a - b <= torch.finfo(dtype).eps * abs(a)}
    for given in (logits, logits.to(dtype)):
        top = top_two(given)
        assert top.seconds is not None
        assert near_ties_of(top.peaks.tolist(), top.seconds.tolist(), dtype) == expected
    assert 5 < len(expected) < 2000
    assert expected[1] == 0.0
    assert torch.equal(logits, before)


def test_broken_rows_become_zeros() -> None:
    logits = torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0], [torch.inf, 0.0]])
    assert without_broken(logits).tolist() == [[1.0, -torch.inf], [0.0, 0.0], [0.0, 0.0]]
    assert without_broken(logits[:1]).tolist() == logits[:1].tolist()


@pytest.mark.usefixtures("way")
def test_no_rows() -> None:
    assert target_probs(torch.empty(0, 5), []).shape == (0, 5)
    assert check_finite(torch.empty(0, 5)).shape == (0,)


def test_check_finite_points_at_the_row() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0.0, 1.0], [nan, 1.0], [inf, 0.0], [-inf, 0.0], [-inf, -inf], [inf, nan]])
    assert check_finite(logits).tolist() == [True, False, False, True, False, False]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("vocab", [4, 2000])
def test_a_broken_row_leaves_the_others_alone(params: SamplingParams, vocab: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2))
    broken = logits.clone()
    broken[1] = torch.nan
    assert torch.equal(target_probs(broken, [params] * 3)[[0, 2]], target_probs(logits, [params] * 3)[[0, 2]])
    assert 0 <= int(draw(target_probs(broken, [params] * 3), torch.full((3,), 0.5, dtype=torch.float64))[1]) < vocab


# Random123's published known answers for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    columns = np.array([counter] * 2, dtype=np.uint64).T, np.array([key] * 2, dtype=np.uint64).T
    assert philox4x32(*columns).T.tolist() == [answer] * 2


def test_uniforms_are_the_top_53_bits_of_the_block() -> None:
    seed, start, index = 2**63 + 5, 1000, 7
    columns = (
        np.array([[index], [start], [int(Purpose.NEXT)], [0]], dtype=np.uint64),
        np.array([[seed % 2**32], [seed >> 32]], dtype=np.uint64),
    )
    first, second = (int(word) for word in philox4x32(*columns)[:2, 0])
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniforms([seed], Purpose.NEXT, [start], [index]).tolist() == [expected]


def test_the_largest_number_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.full((4, 1), 0xFFFFFFFF, dtype=np.uint64)
    monkeypatch.setattr("foretoken.text.randomness.sampling_kernel", lambda: None)
    monkeypatch.setattr("foretoken.text.randomness.philox4x32", lambda counter, key: ones)
    assert uniforms([1], Purpose.DRAFT, [1], [1]).tolist() == [1 - 2.0**-53]


N = 20_000


def test_uniform_in_every_stream() -> None:
    """Kolmogorov-Smirnov over indices, rounds and seeds; with fixed keys, and chosen so that chance fails 1 in 1e6."""
    many, one = list(range(N)), [5] * N
    for seeds, starts, indices in ((one, one, many), (one, many, one), (many, one, one)):
        for purpose in Purpose:
            numbers = uniforms(seeds, purpose, starts, indices)
            assert numbers.dtype == np.float64
            assert numbers.min() >= 0
            assert numbers.max() < 1
            assert stats.kstest(numbers, "uniform").pvalue > 1e-6


def test_neighbours_are_independent() -> None:
    """Correlation of neighbouring indices, rounds, seeds and purposes below 5 sigma: chance fails 6 in 1e7 per pair."""
    many, one = np.arange(N), [9] * N

    def numbers(seed: int = 0, purpose: Purpose = Purpose.ACCEPT, start: int = 0, index: int = 0) -> np.ndarray:
        return uniforms([3 + seed] * N, purpose, many + start, [index] * N)

    base = numbers()
    others = [
        numbers(seed=1),
        numbers(seed=2**32),
        numbers(purpose=Purpose.DRAFT),
        numbers(purpose=Purpose.NEXT),
        numbers(start=1),
        numbers(index=1),
    ]
    for other in [*others, uniforms(one, Purpose.ACCEPT, one, many)]:
        assert not np.any(base == other)
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / np.sqrt(N)


def test_round_uniforms_use_the_index_inside_the_request() -> None:
    draft = Draft(torch.zeros(5, dtype=torch.int64), (-1, 0, -1, 0, 1), (0, 2, 2, 5), (None,) * 3)
    seeds, starts = [2**64 - 1, 0, 7], [10, 20, 30]
    together = round_uniforms(draft, seeds, starts)
    assert together.accept.dtype == together.next.dtype == torch.float64
    assert together.next.tolist() == uniforms(seeds, Purpose.NEXT, starts, [0, 0, 0]).tolist()
    assert together.accept[2:].tolist() == uniforms([7] * 3, Purpose.ACCEPT, [30] * 3, [0, 1, 2]).tolist()
    for b in range(3):
        single = round_uniforms(draft.select([b]), [seeds[b]], [starts[b]])
        assert single.accept.tolist() == together.accept[draft.offsets[b] : draft.offsets[b + 1]].tolist()
        assert single.next.tolist() == [together.next[b].item()]
    assert len({*together.accept.tolist(), *together.next.tolist()}) == 8
    assert round_uniforms(empty_draft(0), [], []).next.shape == (0,)


@pytest.mark.usefixtures("way")
def test_sample_follows_the_law() -> None:
    """Chi-square with 4 degrees of freedom over 20000 draws; chance fails 1 in 1e6."""
    distribution = torch.tensor([0.05, 0.0, 0.4, 0.15, 0.3, 0.1])
    u = torch.from_numpy(uniforms([1] * N, Purpose.NEXT, [1] * N, range(N)))
    counts = np.bincount(draw(distribution.expand(N, -1), u).numpy(), minlength=6)
    assert counts[1] == 0
    kept = distribution.numpy() > 0
    assert (
        stats.chisquare(
            counts[kept],
            N * distribution.numpy()[kept].astype(np.float64) / distribution.numpy()[kept].astype(np.float64).sum(),
        ).pvalue
        > 1e-6
    )
