"""The compiled sampling kernel against torch's operations: the same tokens, the same numbers up to the last bits.

What stands beside a row, and the number of threads, never change a bit of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.config import SamplingParams
from foretoken.core import RaceRows
from foretoken.kernels import sampling as compiled
from foretoken.kernels.build import FLAGS, built
from foretoken.kernels.sampling import SOURCE, SamplingKernel, load, sampling_kernel
from foretoken.text import randomness
from foretoken.text.randomness import Purpose, RaceNoise, race_noise
from foretoken.text.sampling import TopTwo, choices_of, target_probs, top_two
from foretoken.verify import draw, race_winner, race_winners
from tests.helpers.instruction_sets import INSTRUCTION_SETS

VOCABS = (1, 2, 5, 16, 33, 511, 1024, 1500, 8192, 49_152)
FILTERS = [
    {"top_k": k, "top_p": p, "min_p": m}
    for k, p, m in itertools.product((0, 1, 7, 50, 2000), (1.0, 0.95, 0.5, 1e-6), (0.0, 0.03, 1.0))
]


@pytest.fixture(params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SamplingKernel:
    """The kernel as other processors get it; older instructions run here too."""
    found = load(built(SOURCE, tuple(flag.replace("native", request.param) for flag in FLAGS)))
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: found)
    return found


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def twin(function: functools.partial[Tensor]) -> Tensor:
    """What torch's operations make of the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "sampling_kernel", lambda: None)
        return function()


def torch_top_two(logits: Tensor) -> TopTwo:
    """By a sort: of rows without NaN the first of the largest, and of others the first NaN."""
    scores = logits.float()
    ranked = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(-1, descending=True).values
    is_best = torch.where(scores.isnan().any(-1, keepdim=True), scores.isnan(), scores == ranked[:, :1])
    best = is_best.int().argmax(-1)
    seconds = ranked[:, 1] if logits.shape[-1] > 1 else torch.full((len(logits),), -torch.inf)
    return TopTwo(best, scores.gather(-1, best[:, None]).squeeze(-1), seconds)


def logits_of(vocab: int, seed: int = 0) -> Tensor:
    """Rows of every kind [12, V]: peaked, flat, ties, masks, one token left, far apart, large."""
    generator = torch.Generator().manual_seed(1000 * vocab + seed)
    spread = torch.randn(8, vocab, generator=generator)
    rows = torch.stack([spread[i] * scale for i, scale in enumerate((0.01, 1.0, 3.0, 12.0, 60.0))])
    ties = torch.randint(-3, 3, (2, vocab), generator=generator).float() * 1.5
    masked = torch.where(torch.rand(2, vocab, generator=generator) < 0.7, -torch.inf, spread[5:7] * 4)
    masked[:, vocab // 2] = 1.0
    lone = torch.full((1, vocab), -torch.inf)
    lone[0, vocab - 1] = -3.0
    return torch.cat([rows, ties, masked, lone, torch.zeros(1, vocab), 1e5 + spread[7:8].round()])


def check_distributions(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Equal numbers for the same tokens, but for tokens at a border that are equally likely up to the last bits.

    Of those, another exponential puts another one first. Torch adds a row in float32, in an order that depends on the
    processor, and is off by up to 2e-5 for many equal numbers: its rows are divided by their sum in float64 first.
    """
    found = target_probs(logits, params)
    expected = twin(functools.partial(target_probs, logits, params))
    assert found.dtype == expected.dtype
    for row, (own, other) in enumerate(zip(found, expected, strict=True)):
        told = str((row, params[row]))
        both, one = (own > 0) & (other > 0), (own > 0) != (other > 0)
        assert bool(both.any()), told
        if bool(one.any()):
            cold = max(params[row].temperature, 1e-20)
            scores = (logits[row] / cold).double()[one & (logits[row] > -torch.inf)]
            tiny = torch.maximum(own, other)[one].max() < 1e-37  # what one of both rounds to zero
            assert tiny or float(scores.max() - scores.min()) < 4e-6, told
            own, other = (torch.where(both, part, 0) / part[both].sum() for part in (own, other))
        assert abs(float(own.double().sum()) - 1) < 2e-6, told
        other = (other.double() / other.double().sum()).to(other.dtype)
        torch.testing.assert_close(own, other, rtol=4e-6, atol=1e-37, msg=told)


@pytest.mark.parametrize("largest", [3e38, 1e30, 1e19, -1e30])
@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.5])
def test_huge_logits_at_a_low_temperature_leave_the_largest(
    kernel: SamplingKernel, monkeypatch: pytest.MonkeyPatch, largest: float, temperature: float
) -> None:
    """Their quotient is infinite in 32 bits; a distribution of NaN would draw anything."""
    logits = torch.full((len(FILTERS), 1500), largest)
    logits -= logits.abs() / 2
    logits[:, 700] = largest
    logits[:, 9] = -torch.inf
    params = [SamplingParams(temperature=temperature, **filters) for filters in FILTERS]
    expected = torch.zeros_like(logits).scatter_(-1, torch.full((len(logits), 1), 700), 1)
    best = top_two(logits).best
    assert torch.equal(target_probs(logits, params), expected)
    assert torch.equal(target_probs(logits, params, best), expected)
    choices, races = choices_of(params, 1500), [(1, 2, row) for row in range(len(logits))]
    starts, tokens = range(len(logits) + 1), [-1] * len(logits)
    assert kernel.coupled(logits, choices, best, starts, tokens, tokens, races) == [700] * len(logits)
    drafts, halves = torch.full((len(logits) - 1,), 700), torch.full((len(logits) - 1,), 0.5).double()
    offsets = (0, len(drafts))
    rows, following, chances = kernel.chains(logits, choices, best, offsets, drafts, halves, halves[:1])
    assert (rows, following, set(chances)) == ([len(drafts)], [700], {1.0})
    monkeypatch.setattr(compiled, "sampling_kernel", lambda: None)
    assert torch.equal(target_probs(logits, params), expected)


@pytest.mark.parametrize("vocab", [*VOCABS, 4095, 4097, 12_305])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_largest_are_those_of_the_twin(
    kernel: SamplingKernel, threads: None, vocab: int, dtype: torch.dtype
) -> None:
    """Ties, masks, infinities and NaN among them; the same with one thread."""
    logits, odd = logits_of(vocab), logits_of(vocab, seed=1)
    odd[0, vocab // 3], odd[1, vocab - 1], odd[2], odd[3] = torch.inf, torch.nan, -torch.inf, torch.nan
    logits = torch.cat([logits, odd]).to(dtype)
    expected = torch_top_two(logits)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found = top_two(logits)
        assert found.best.tolist() == expected.best.tolist()
        torch.testing.assert_close(found.peaks, expected.peaks, rtol=0, atol=0, equal_nan=True)
        assert found.seconds is not None
        usable = ~expected.peaks.isnan()
        assert found.seconds[usable].tolist() == expected.seconds[usable].tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_distributions_equal_their_twin(kernel: SamplingKernel, vocab: int) -> None:
    """Every filter and every two of them, on rows of every kind; large vocabularies with fewer combinations."""
    logits = logits_of(vocab)
    chosen = FILTERS if vocab <= 1500 else [*FILTERS[:12], *FILTERS[25::9]]
    for number, own in enumerate(chosen):
        temperature = (1.0, 0.7, 1.9)[number % 3]
        if 0 < own["top_p"] < 1:  # no whole number of equal tokens has exactly this mass
            own = own | {"top_p": own["top_p"] * 0.991}
        check_distributions(logits, [SamplingParams(temperature=temperature, **own)] * len(logits))


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-7, 1e-3, 0.05, 30.0, 100.0])
@pytest.mark.parametrize("vocab", [3, 700, 3000])
def test_tiny_and_huge_temperatures(kernel: SamplingKernel, vocab: int, temperature: float) -> None:
    logits = logits_of(vocab)
    for own in ({}, {"top_k": 3}, {"top_p": 0.877}, {"min_p": 0.2}):
        check_distributions(logits, [SamplingParams(temperature=temperature, **own)] * len(logits))


@pytest.mark.parametrize("top_k", [700, 701, 2**63, 2**64 + 1])
def test_more_tokens_than_there_are_is_no_filter(kernel: SamplingKernel, top_k: int) -> None:
    logits = logits_of(700)
    every, free = ([SamplingParams(temperature=1.0, top_k=k)] * len(logits) for k in (top_k, 0))
    assert torch.equal(target_probs(logits, every), target_probs(logits, free))


def test_probabilities_are_those_of_float64(kernel: SamplingKernel) -> None:
    """Up to what rounding a score costs, down to the least number of float32."""
    spread = torch.randn(4, 128_000, generator=torch.Generator().manual_seed(5))
    for logits in (spread * torch.tensor([[1.0], [4.0], [9.0], [14.0]]), logits_of(49_152)):
        found = target_probs(logits, [SamplingParams(temperature=1.0)] * len(logits)).double()
        torch.testing.assert_close(found, logits.double().softmax(-1), rtol=6e-6, atol=2e-45)
        assert found[3][found[3] > 0].min() < 1e-38  # what is less than the least normal number stays


def test_other_formats(kernel: SamplingKernel) -> None:
    """bfloat16 is widened, float64 is left to torch."""
    logits = logits_of(3000)
    params = [SamplingParams(temperature=0.8, top_p=0.9)] * len(logits)
    half = logits.bfloat16()
    assert torch.equal(target_probs(half, params), target_probs(half.float(), params))
    wide = target_probs(logits.double(), params)
    assert wide.dtype == torch.float64
    assert torch.equal(wide, twin(functools.partial(target_probs, logits.double(), params)))
    wanted = logits[:2].clone().requires_grad_()
    target_probs(wanted, params[:2]).amax().backward()
    assert wanted.grad is not None


@pytest.mark.parametrize("vocab", [33, 20_000])
def test_a_row_does_not_depend_on_its_neighbours_or_threads(vocab: int, threads: None) -> None:
    logits = logits_of(vocab).repeat(3, 1)
    params = [
        SamplingParams(temperature=0.0 if i % 7 == 3 else 0.6 + 0.1 * (i % 5), **FILTERS[i % len(FILTERS)])
        for i in range(len(logits))
    ]
    u = torch.rand(len(logits), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    races = [RaceRows(RaceNoise(i, vocab), (i,)) for i in range(len(logits))]
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        probs = target_probs(logits, params)
        results.append((probs, race_winners(probs, races), draw(probs, u)))
        for i in range(0, len(logits), 5):
            alone = target_probs(logits[i : i + 1], params[i : i + 1])
            assert torch.equal(alone[0], probs[i])
            assert race_winners(alone, races[i : i + 1]).item() == results[-1][1][i]
            assert draw(alone, u[i : i + 1]).item() == results[-1][2][i]
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("vocab", [*VOCABS, 128_000])
def test_winners_are_those_of_the_noise_itself(kernel: SamplingKernel, vocab: int) -> None:
    """Rows of every kind, seeds and positions up to 64 bits; a row with one weight, and a row without."""
    logits = logits_of(vocab)
    for own in ({}, {"top_p": 0.9}, {"top_k": 2}):
        weights = target_probs(logits, [SamplingParams(temperature=1.2, **own)] * len(logits))
        weights[-1] = 0
        weights[-2] *= 1e-42
        seeds = [0, 1, 2**63 + 7, 2**64 - 1, *range(50, 50 + len(weights) - 4)]
        positions = [0, 2**40, *range(len(weights) - 2)]
        races = [RaceRows(RaceNoise(seed, vocab), (place,)) for seed, place in zip(seeds, positions, strict=True)]
        noise = torch.cat([race.noise.at(race.positions) for race in races])
        assert torch.equal(race_winners(weights, races), race_winner(weights, noise))
    assert race_winners(weights[:0], []).shape == (0,)


def test_many_winners(kernel: SamplingKernel) -> None:
    """2,000 races over a flat row of 300, in which any mistake of a bound or of a word shows."""
    weights = torch.rand(1, 300, generator=torch.Generator().manual_seed(3)).expand(2000, -1)
    noise = torch.from_numpy(np.stack([race_noise(9, position, 300) for position in range(2000)]))
    found = race_winners(weights, [RaceRows(RaceNoise(9, 300), tuple(range(2000)))])
    assert torch.equal(found, race_winner(weights, noise))
    assert len(set(found.tolist())) > 250


def test_equal_ratios_go_to_the_lowest_id(kernel: SamplingKernel) -> None:
    """Infinite ratios are equal, and so are weights that are no numbers: both count as largest."""
    for value in (torch.inf, torch.nan):
        for places in ([7, 40], [3, 4], [2, 33], [20, 21, 9000], [8200, 8195]):
            weights = torch.rand(1, 10_000)
            weights[0, places] = value
            assert race_winners(weights, [RaceRows(RaceNoise(1, 10_000), (5,))]).tolist() == [min(places)]


def test_noise_given_as_numbers_is_read(kernel: SamplingKernel) -> None:
    """A request whose noise was made beside one whose noise was not."""
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(4))
    own = RaceNoise(5, 40)
    given = torch.rand(1, 40)
    noise = torch.cat([own.at([1, 2]), given])
    assert torch.equal(race_winners(weights, [RaceRows(own, (1, 2)), given]), race_winner(weights, noise))
    double = race_winners(weights.double(), [RaceRows(own, (1, 2)), given])
    assert torch.equal(double, race_winner(weights.double(), noise))


@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 5000, 128_000])
def test_draws_equal_their_twin(kernel: SamplingKernel, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(40, vocab, generator=generator) ** 8
    weights[::3] *= torch.rand(14, vocab, generator=generator) < 0.05
    weights[1, : vocab // 2] = 0
    weights[2, vocab // 2 :] = 0
    weights[5] = torch.zeros(vocab).index_fill_(0, torch.tensor([vocab // 3]), 1e-30)
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    u[:8], u[8:16] = 0, 1 - 2.0**-53
    found, has_weight = draw(weights, u), weights.amax(-1) > 0
    expected = twin(functools.partial(draw, weights, u))
    assert torch.equal(found[has_weight], expected[has_weight])
    assert (weights.gather(-1, found[:, None])[has_weight] > 0).all()
    assert ((found >= 0) & (found < vocab)).all()


def test_a_number_of_one_takes_the_last_token_with_weight(kernel: SamplingKernel) -> None:
    weights = torch.zeros(2, 2000)
    weights[:, [3, 700, 1200]] = torch.tensor([0.3, 0.3, 0.1])
    assert draw(weights, torch.ones(2, dtype=torch.float64)).tolist() == [1200, 1200]
    assert 0 <= int(draw(weights * torch.nan, torch.full((2,), 0.5, dtype=torch.float64))[0]) < 2000


def test_without_a_compiler_torch_does_it(no_kernel: None) -> None:
    noise = RaceNoise(3, 50)
    rows = noise.rows([4, 9])
    assert isinstance(rows, Tensor)
    assert torch.equal(rows, noise.at([4, 9]))


def test_with_a_compiler_no_noise_is_made() -> None:
    assert sampling_kernel() is not None
    noise = RaceNoise(3, 50)
    assert noise.rows([4, 9]) == RaceRows(noise, (4, 9))
    assert noise._rows == {}


def test_uniform_numbers_are_those_of_numpy(kernel: SamplingKernel) -> None:
    """Seeds of 64 bits, counts up to 32 bits."""
    made = np.random.default_rng(5)
    seeds = [0, 2**64 - 1, *made.integers(0, 2**64, 500, dtype=np.uint64).tolist()]
    starts, indices = ([0, 2**32 - 1, *made.integers(0, 2**32, 500).tolist()] for _ in range(2))
    for purpose in Purpose:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(randomness, "sampling_kernel", lambda: None)
            expected = randomness.uniforms(seeds, purpose, starts, indices)
            patch.setattr(randomness, "sampling_kernel", lambda: kernel)
            assert randomness.uniforms(seeds, purpose, starts, indices).tolist() == expected.tolist()
