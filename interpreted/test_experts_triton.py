"""A mixture of experts as Triton kernels gives what torch's operations give, through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.kernels import expert_routes_triton, experts_triton
from foretoken.kernels.experts_work import TILE_FIELDS, StackedMixture
from foretoken.model.expert_launches import stacked
from foretoken.model.experts import Experts
from tests.helpers.experts import HIDDEN, MIXTURES, mixture
from tests.model.test_experts import by_hand

# A sum of up to 96 products of numbers up to 3; channels are rounded in between.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def rows_of(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """A part of wider rows."""
    return torch.randn(count, HIDDEN + 32, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, :HIDDEN]


def stack_of(experts: Experts, x: Tensor) -> StackedMixture:
    found = stacked(experts, x)
    assert found is not None
    return found


def through(experts: Experts, x: Tensor) -> Tensor:
    return experts_triton.run(stack_of(experts, x), x)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_equal_a_loop_over_rows_and_experts(name: str, dtype: torch.dtype) -> None:
    """All kinds of routers, gates, biases and shared experts, with experts that no row goes to."""
    experts, x = mixture(MIXTURES[name], dtype=dtype), rows_of(5, dtype)
    expected = by_hand(experts, x)
    torch.testing.assert_close(through(experts, x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss", "all"])
def test_a_row_has_its_bits_whoever_is_beside_it(name: str) -> None:
    experts, x = mixture(MIXTURES[name]), rows_of(40)
    together = through(experts, x)
    for row in (0, 39):
        assert torch.equal(together[row], through(experts, x[row : row + 1])[0])
    assert torch.equal(through(experts, x.flip(0)), together.flip(0))


@pytest.mark.parametrize(("num_rows", "lines"), [(3, 16), (70, 16), (130, 32), (300, 64)])
def test_all_rows_to_one_expert_and_none_to_the_others(num_rows: int, lines: int) -> None:
    experts = mixture(replace(MIXTURES["one"], num_experts=6))
    x = rows_of(num_rows).abs()
    experts.router.weight.zero_()
    experts.router.weight[4] = 1.0
    assert expert_routes_triton.tiling_of(num_rows, 6, 4).lines == lines
    found = through(experts, x)
    torch.testing.assert_close(found[-2:].double(), by_hand(experts, x[-2:]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, experts.mixed(x, *experts.route(x)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "num_active", "num_experts"), [(1, 1, 1), (1, 8, 128), (90, 3, 7), (17, 2, 8), (600, 4, 5)]
)
def test_places_by_expert(num_rows: int, num_active: int, num_experts: int) -> None:
    """Every place that has an expert is in one tile of it; tiles behind the last are empty."""
    generator = torch.Generator().manual_seed(num_rows)
    skewed = torch.rand(num_rows, num_experts, generator=generator) ** torch.arange(1, num_experts + 1)
    chosen = skewed.argsort(1, descending=True)[:, :num_active].int()
    chosen[1::7] = num_experts
    work = expert_routes_triton.grouped(chosen, num_experts, 2)
    assert work.places is not None
    assert work.tiles is not None
    flat, seen = chosen.flatten(), list[int]()
    for expert, first, count, _ in work.tiles.view(-1, TILE_FIELDS).tolist():
        assert count <= work.tiling.lines
        own = work.places[first : first + count]
        assert bool((flat[own] == expert).all())
        seen += own.tolist()
    assert seen == flat.sort(stable=True).indices[: int((flat < num_experts).sum())].tolist()


@pytest.mark.parametrize("normalises", [True, False])
def test_equal_scores_go_to_the_first_expert(normalises: bool) -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0] * 5, [float("-inf")] * 4 + [1.0]])
    chosen, weights = expert_routes_triton.choose(scores, 3, normalises)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [4, 0, 1]]
    expected = scores.softmax(1).gather(1, chosen.long())
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True) if normalises else expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_no_number_wakes_no_expert(wrong: float) -> None:
    """As rows that pad a captured step have none."""
    scores = torch.zeros(3, 5)
    scores[1] = wrong
    chosen, weights = expert_routes_triton.choose(scores, 2, True)
    assert chosen.tolist() == [[0, 1], [5, 5], [0, 1]]
    assert weights.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["qwen2", "gpt-oss"])
def test_a_row_that_is_no_number_leaves_the_others_alone(name: str, wrong: float) -> None:
    experts, x = mixture(MIXTURES[name]), rows_of(4)
    expected = through(experts, x)
    x[1, 3] = wrong
    found = through(experts, x)
    assert not bool(found[1].isfinite().any())
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


def test_no_rows() -> None:
    experts, x = mixture(MIXTURES["qwen2"]), rows_of(0)
    assert through(experts, x).shape == (0, HIDDEN)
