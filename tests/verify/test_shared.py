"""What all rules share, each against its definition: with the compiled kernels, without them, and on other devices.

Tensors of the device "meta" have shapes and no numbers: they stand for a device where the host waits for numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.core import Draft, RaceRows
from foretoken.text.randomness import RaceNoise
from foretoken.verify import RULES, base
from tests.verify.batches import random_batch

META = torch.device("meta")
UNIFORMS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.999, 1 - 2.0**-53)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "kernel_for", lambda _weights: None)


def first_exceeding(weights: Sequence[float], u: float) -> int:
    """The definition, in float64: the first token at which the cumulative weight exceeds u times the sum."""
    totals = list(itertools.accumulate(map(float, weights)))
    return next(token for token, total in enumerate(totals) if total > u * totals[-1])


def weights_with_holes(seed: int, rows: int, vocab: int) -> Tensor:
    """Powers of two and zeros, so that points lie on borders exactly."""
    found = np.random.default_rng(seed).choice([0.0, 0.25, 0.5, 1.0], size=(rows, vocab))
    found[:, seed % vocab] = 0.5
    return torch.tensor(found, dtype=torch.float32)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_draw_is_the_first_token_that_exceeds_the_point(
    seed: int, has_kernels: bool, request: pytest.FixtureRequest
) -> None:
    if not has_kernels:
        request.getfixturevalue("without_kernels")
    weights = weights_with_holes(seed, len(UNIFORMS), 5)
    for dtype in (torch.float32, torch.float64):
        found = base.draw(weights, torch.tensor(UNIFORMS, dtype=dtype))
        # In float32 the last number before 1 is 1 itself, and the last token with weight is drawn.
        expected = [
            first_exceeding(row, min(u, 1 - 2.0**-53)) for row, u in zip(weights.tolist(), UNIFORMS, strict=True)
        ]
        assert found.tolist() == expected


@pytest.mark.usefixtures("without_kernels")
def test_a_row_of_zeros_does_not_change_the_other_rows() -> None:
    weights = weights_with_holes(1, len(UNIFORMS), 5)
    expected = [first_exceeding(row, u) for row, u in zip(weights.tolist(), UNIFORMS, strict=True)]
    found = base.draw(torch.cat([torch.zeros(1, 5), weights]), torch.tensor((0.3, *UNIFORMS), dtype=torch.float64))
    assert found.tolist()[1:] == expected
    assert 0 <= int(found[0]) < 5


@pytest.mark.usefixtures("without_kernels")
def test_weights_are_summed_in_float64() -> None:
    """In float32 the sum of 2**24 and 1 is 2**24: the second token would never be drawn."""
    weights = torch.tensor([[2.0**24, 1.0, 0.0]])
    assert base.draw(weights, torch.tensor([1 - 2.0**-26], dtype=torch.float64)).tolist() == [1]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("weights", "sums", "u", "expected"),
    [
        ([0.5, 0.0, 0.5, 0.0], [0.5, 0.5 + 1e-9, 1.0, 1.0], 0.5 + 5e-10, 2),  # lands on a hole, and goes on
        ([0.5, 0.0, 0.0, 0.5], [0.5, 0.5 + 1e-9, 0.5, 1.0], 0.5 + 5e-10, 3),
        ([0.5, 0.5, 0.0, 0.0], [0.5, 1.0, 1.0, 1.0 + 1e-9], 1 - 1e-12, 1),  # lands on a hole at the end, and goes back
        ([0.0, 0.5, 0.5, 0.0], [0.0, 0.5, 1.0, 1.0], 1.0, 2),  # beyond the end
        ([0.5, 0.0, 0.5, 0.5], [0.5, 0.5 + 1e-9, 1.0, 1.5], (0.5 + 5e-10) / 1.5, 2),  # the nearest, not the last
        ([0.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5 + 1e-9], 1 - 1e-12, 0),  # the only one is the first
    ],
)
def test_sums_of_a_parallel_machine_are_corrected(
    weights: list[float], sums: list[float], u: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prefix sums are off in their last bits: no token without weight is drawn all the same."""
    other, points = [0.25, 0.25, 0.25, 0.25], torch.tensor([u, 0.6], dtype=torch.float64)
    given = torch.tensor([sums, [0.25, 0.5, 0.75, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, _dim: given[: len(self)])
    assert base.draw(torch.tensor([weights, other]), points).tolist() == [expected, 2]
    assert base.draw(torch.tensor([weights]), points[:1]).tolist() == [expected]


def test_rows_that_may_end_a_round_are_drawn_before_they_are_known() -> None:
    draft, probs, uniforms = random_batch(5)
    weights, there = probs.clamp(min=1e-3), torch.empty(probs.shape, device=META)
    (found,) = base.draws_anywhere(draft, there, lambda rows: weights[list(rows)], uniforms)
    owners = [b for b, length in enumerate(draft.lengths) for _ in range(length + 1)]
    assert len(found) == draft.num_rows == len(owners)
    assert found.tolist() == base.draw(weights, uniforms.next[owners]).tolist()


@pytest.mark.parametrize(("numbers", "expected"), [(4_194_304, 1), (4_194_305, 0)])
def test_too_many_rows_are_not_drawn_before_they_are_known(numbers: int, expected: int) -> None:
    draft, probs, uniforms = random_batch(5)
    found = base.draws_anywhere(draft, torch.empty(numbers, device=META), lambda rows: probs[list(rows)], uniforms)
    assert len(found) == expected
    assert base.draws_anywhere(draft, probs, lambda rows: probs[list(rows)], uniforms) == ()


@pytest.mark.parametrize("rule", ["rejection", "typical"])
def test_a_round_that_is_drawn_early_ends_like_one_that_is_drawn_late(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        batch = random_batch(seed)
        late = RULES[rule].verify(*batch)
        with monkeypatch.context() as patch:
            patch.setattr(base, "is_awaited", lambda _device: True)
            assert RULES[rule].verify(*batch) == late


def test_who_waits_for_numbers() -> None:
    assert base.is_awaited(META) is True
    assert base.is_awaited(torch.device("cpu")) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_first_maximum(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-1.0, -3.0, -2.0], [0.0, float("nan"), 5.0]], dtype=dtype)
    assert base.first_max(rows).tolist() == [1, 0, 0, 1]
    assert base.first_max(rows.expand(2, 4, 3)).shape == (2, 4)
    assert base.first_max(rows.to(META)).shape == (4,)
    assert base.first_max(rows.expand(2, 4, 3).to(META)).shape == (2, 4)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_races_of_several_requests_are_those_of_each(has_kernels: bool, request: pytest.FixtureRequest) -> None:
    """By keys, by rows of noise, and by both together."""
    if not has_kernels:
        request.getfixturevalue("without_kernels")
    vocab = 6
    keyed = [
        RaceRows(RaceNoise(seed, vocab), positions) for seed, positions in ((3, (4, 5)), (8, (1,)), (3, (9, 10, 11)))
    ]
    weights = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(vocab), size=6), dtype=torch.float32)
    noise = torch.cat([one.noise.at(one.positions) for one in keyed])
    expected = (noise / weights).argmin(-1).tolist()
    assert base.race_winners(weights, keyed).tolist() == expected
    assert base.race_winners(weights, [noise]).tolist() == expected
    assert base.race_winners(weights, [keyed[0], noise[2:3], keyed[2]]).tolist() == expected
    assert base.race_winners(weights[:0], []).tolist() == []


@pytest.mark.parametrize(
    ("vocab", "device", "expected"),
    [
        (262_144, "cpu", [1] * 5),
        (131_072, "cpu", [2, 2, 1]),
        (131_073, "cpu", [1] * 5),
        (9_999_999, "cpu", [1] * 5),
        (131_072, "meta", [5]),
    ],
)
def test_rows_are_processed_in_pieces_that_fit_a_cache(vocab: int, device: str, expected: list[int]) -> None:
    matrix = torch.empty(5, 1, device=device).expand(5, vocab)
    found = list(base.pieces([3, 1, 4, 0, 2], matrix))
    assert [len(one) for one in found] == expected
    assert list(itertools.chain.from_iterable(found)) == [3, 1, 4, 0, 2]


def test_of_two_walks_of_equal_length_the_first_is_chosen() -> None:
    """Siblings with the same token, each with a child that matches."""
    parents = (-1, -1, 0, 1)
    draft = Draft(torch.tensor([7, 7, 8, 8]), parents, (0, 4), ("toy",))
    assert base.deepest_walk(draft, [True] * 4) == ([3], [1.0, 0.0, 1.0, 1.0])
    assert base.deepest_walk(draft, [True, True, False, True]) == ([4], [0.0, 1.0, 0.0, 1.0])
    assert base.deepest_walk(draft, [True, True, False, False]) == ([1], [1.0, 0.0, 0.0, 0.0])
