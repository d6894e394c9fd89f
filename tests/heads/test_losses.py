"""The losses of heads: value, gradient and acceptance against the formulas in float64, by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, Place
from foretoken.heads.losses import (
    LOSS_KINDS,
    LossConfig,
    LossKind,
    acceptance,
    compare,
    same_argmax,
    weighted_loss,
)

ROWS, TOKENS = 23, 11
WHOLE = DraftVocabulary.whole(TOKENS)
CUT = DraftVocabulary(torch.tensor([0, 2, 3, 7, 10]), TOKENS)


def eager(kind: LossKind, target: Tensor, logits: Tensor) -> Tensor:
    """The textbook forms, by row; `target` is restricted to the head's vocabulary already."""
    p, q = target.softmax(-1), logits.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    middle = (p + q) / 2
    weight = torch.exp(-3 * alpha.detach())
    forms = {
        "kl": kl,
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "jsd": ((p * (p.log() - middle.log())).sum(-1) + (q * (q.log() - middle.log())).sum(-1)) / 2,
        "tv": (p - q).abs().sum(-1) / 2,
        "nla": -alpha.log(),
        "lk": weight * kl + (1 - weight) * (1 - alpha),
    }
    return forms[kind]


def example(vocabulary: DraftVocabulary, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Place]:
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(40, TOKENS, generator=generator, dtype=torch.float64)
    logits = 2 * torch.randn(ROWS, len(vocabulary.ids), generator=generator, dtype=torch.float64)
    rows = torch.randperm(40, generator=generator)[:ROWS]
    return target.to(dtype), Place(2, logits.to(dtype).requires_grad_(True), rows)


@pytest.mark.parametrize("vocabulary", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_loss_and_gradient_are_those_of_the_formula(kind: LossKind, vocabulary: DraftVocabulary) -> None:
    target, place = example(vocabulary)
    compared = compare(place, lambda rows: vocabulary.restrict(target[rows]), LossConfig(kind, chunk_rows=5))
    twin = place.logits.detach().clone().requires_grad_(True)
    expected = eager(kind, vocabulary.restrict(target[place.rows]), twin).mean()
    torch.testing.assert_close(compared, expected, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(compared * 3, place.logits)
    (expected_gradient,) = torch.autograd.grad(expected * 3, twin)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("vocabulary", [WHOLE, CUT], ids=["whole", "cut"])
def test_acceptance_is_against_the_whole_distribution_of_the_target(vocabulary: DraftVocabulary) -> None:
    target, place = example(vocabulary)
    alpha = acceptance(place, lambda rows: target[rows], vocabulary)
    p = target[place.rows].softmax(-1)
    q = vocabulary.expand(place.logits).softmax(-1)
    torch.testing.assert_close(alpha, torch.minimum(p, q).sum(-1).detach(), atol=1e-12, rtol=0)
    same = same_argmax(place, lambda rows: target[rows], vocabulary)
    assert same.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    if vocabulary is CUT:
        assert bool((alpha < 1).all())


def test_bfloat16_logits_get_a_bfloat16_gradient() -> None:
    target, place = example(WHOLE, torch.bfloat16)
    compared = compare(place, lambda rows: target[rows], LossConfig())
    compared.backward()  # type: ignore[no-untyped-call]
    assert compared.dtype == torch.float32
    assert place.logits.grad is not None
    assert place.logits.grad.dtype == torch.bfloat16


def test_places_decay_and_what_a_head_adds_is_weighted() -> None:
    target, place = example(WHOLE)
    config = LossConfig(place_decay=0.5, extra_weight=0.1)
    compared = compare(place, lambda rows: target[rows], config)
    with_extra = Place(2, place.logits, place.rows, torch.tensor(10.0))
    torch.testing.assert_close(weighted_loss(place, compared, config), compared / 4)
    torch.testing.assert_close(weighted_loss(with_extra, compared, config), (compared + 1) / 4)


def test_a_place_without_rows_costs_nothing() -> None:
    target, _ = example(WHOLE)
    empty = Place(0, torch.zeros(0, TOKENS, requires_grad=True), torch.zeros(0, dtype=torch.int64))
    compared = compare(empty, lambda rows: target[rows], LossConfig())
    compared.backward()  # type: ignore[no-untyped-call]
    assert compared.item() == 0
    assert len(acceptance(empty, lambda rows: target[rows], WHOLE)) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "mse"), ("place_decay", 0.0), ("extra_weight", -1.0), ("extra_weight", float("nan")), ("chunk_rows", 0)],
)
def test_bad_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        LossConfig(**{field: value})  # type: ignore[arg-type]


def test_acceptance_of_more_rows_than_are_held_at_once() -> None:
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(150, TOKENS, generator=generator, dtype=torch.float64)
    place = Place(0, torch.randn(150, TOKENS, generator=generator, dtype=torch.float64), torch.arange(150).flip(0))
    found = acceptance(place, lambda rows: target[rows], WHOLE)
    expected = torch.minimum(target.flip(0).softmax(-1), place.logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
