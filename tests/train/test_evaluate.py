"""Evaluation: windows add up, and a model agrees with itself."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.train.evaluate import agreement, bits_per_byte, logits_of, loss_nats
from tests.train.test_trainer import decoder


def test_loss_is_the_sum_over_windows() -> None:
    model, ids = decoder(), [3, 7, 1, 9, 4, 4, 8, 2, 5, 6]
    by_hand = 0.0
    for start in (0, 4, 8):
        window = torch.tensor(ids[start : start + 5])
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            distribution = logits_of(model, window[None, :-1]).float().log_softmax(-1)
        by_hand -= float(distribution[torch.arange(len(window) - 1), window[1:]].sum())
    assert loss_nats(model, ids, length=4) == pytest.approx(by_hand, rel=1e-5)
    assert bits_per_byte(model, ids, 20) == pytest.approx(loss_nats(model, ids) / math.log(2) / 20)


def test_a_model_agrees_with_itself_and_less_with_another() -> None:
    ids = list(range(1, 41))
    same = agreement(decoder(), decoder(), ids, length=16)
    assert (same.tokens, same.greedy) == (40, 1.0)
    assert same.sampled == pytest.approx(1.0, abs=1e-6)
    assert agreement(decoder(), decoder(seed=1), ids, length=16).sampled < 0.99
