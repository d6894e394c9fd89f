"""What filters keep under every rounding and under some: bounds that hold for all roundings tried, and are not far from
them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams
from foretoken.text.sampling import support, target_probs

FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.15},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 39, "top_p": 0.999},
]


def rows(vocab: int, step: float) -> Tensor:
    """Rows with ties, exact ones where `step` is coarse, and with banned tokens."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(12, vocab, generator=generator) / step).round() * step
    logits[3, : vocab // 2] = -torch.inf
    logits[4] = 1.0
    return logits


def moved(logits: Tensor, rounding: float, number: int) -> Tensor:
    """Every logit moved by at most half of `rounding`: at random, to the ends, or around one token."""
    generator = torch.Generator().manual_seed(number)
    noise = torch.rand(logits.shape, generator=generator) - 0.5
    if number % 3 == 1:
        noise = noise.sign() / 2
    elif number % 3 == 2:
        chosen = logits.topk(1 + number // 3 % 8).values[
            :, -1:
        ]  # the most and the least that can be done for this token
        noise = torch.where(logits > chosen, -0.5, 0.5) * (1 if number % 2 else -1)
    return logits + rounding * noise


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(
    ("step", "temperature"), [(1e-6, 0.05), (0.0625, 1.5)]
)  # each with each: proof/test_support.py
@pytest.mark.repeated
def test_every_rounding_lies_between_the_bounds(filters: dict[str, float], step: float, temperature: float) -> None:
    check_bounds(filters, step, temperature)


def check_bounds(filters: dict[str, float], step: float, temperature: float) -> None:
    """Thirty roundings of rows of three sizes."""
    for vocab in (40, 1500, 3000):
        logits = rows(vocab, step)
        params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
        for rounding in (1e-5, 0.02, 0.4):
            found = support(logits, torch.full((len(logits),), rounding), params)
            assert (found.certain <= found.possible).all()
            kept = torch.stack(
                [target_probs(moved(logits, rounding, number), [params] * len(logits)) > 0 for number in range(30)]
            )
            assert not (found.certain & ~kept.all(0)).any()
            assert not (kept.any(0) & ~found.possible).any()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_without_ties_or_rounding_nothing_is_in_doubt(filters: dict[str, float]) -> None:
    logits = rows(1500, 1e-6)[:3].double()
    params = SamplingParams(temperature=1.2, **filters)  # type: ignore[arg-type]
    found = support(logits, torch.zeros(len(logits)), params)
    kept = target_probs(logits, [params] * len(logits)) > 0
    assert (found.certain == kept).all()
    assert (found.possible == kept).all()


def test_without_filters_all_that_is_not_banned_is_certain() -> None:
    logits = torch.tensor([[0.0, -5.0, -torch.inf, -103.8, -300.0]])
    found = support(logits, torch.tensor([0.5]), SamplingParams(temperature=1.0))
    assert found.certain.tolist() == [[True, True, False, False, False]]  # exp(-104) is 0 in float32
    assert found.possible.tolist() == [[True, True, False, True, False]]
    cold = support(logits[:, :2], torch.tensor([0.5]), SamplingParams(temperature=1e-8))
    assert cold.possible.tolist() == [[True, False]]


def test_a_tie_with_the_last_token_that_is_kept_is_in_doubt() -> None:
    """W2: of equally likely tokens at the border of top_p the lowest ids go, so the distribution keeps one of the
    two here.
    """
    logits, params = torch.tensor([[4.0, 2.0, 2.0, 0.0]]), SamplingParams(temperature=1.5, top_p=0.75)
    assert (target_probs(logits, [params]) > 0).tolist() == [[True, False, True, False]]
    found = support(logits, torch.tensor([1e-4]), params)
    assert found.certain.tolist() == [[True, False, False, False]]
    assert found.possible.tolist() == [[True, True, True, False]]
