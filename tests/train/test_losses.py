"""The losses, against their formulas in float64."""

from __future__ import annotations

import torch

from foretoken.train.evaluate import acceptance, cross_entropy, distillation


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)


def test_cross_entropy_is_the_mean_surprise() -> None:
    _, logits = distributions()
    tokens = torch.tensor([0, 6, 3, 2, 1])
    expected = -logits.double().softmax(-1)[torch.arange(5), tokens].log().mean()
    torch.testing.assert_close(cross_entropy(logits, tokens).double(), expected, atol=1e-6, rtol=0)


def test_acceptance_is_one_for_the_teacher_itself_and_symmetric() -> None:
    teacher, student = distributions()
    torch.testing.assert_close(acceptance(teacher, teacher), torch.ones(5))
    torch.testing.assert_close(acceptance(teacher, student), acceptance(student, teacher))
    distance = (teacher.softmax(-1) - student.softmax(-1)).abs().sum(-1) / 2
    torch.testing.assert_close(acceptance(teacher, student), 1 - distance)


def test_distillation_is_zero_at_the_teacher_and_pulls_towards_it() -> None:
    teacher, student = distributions()
    assert distillation(teacher, teacher).abs() < 1e-6
    student.requires_grad_(True)
    before = acceptance(teacher, student).mean().item()
    for _ in range(50):
        loss = distillation(teacher, student)
        (gradient,) = torch.autograd.grad(loss, student)
        student = (student - 5.0 * gradient).detach().requires_grad_(True)
    assert acceptance(teacher, student).mean().item() > before + 0.2
