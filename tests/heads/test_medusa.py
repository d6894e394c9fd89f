"""Medusa and Hydra heads: training against an eager twin in float64, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, HeadBatch
from foretoken.heads.config import MedusaConfig
from foretoken.heads.medusa import MedusaHead
from foretoken.model.architecture import ModelConfig
from foretoken.model.decoder import Decoder

VOCAB, HIDDEN, ROWS = 41, 12, 9


def make_target() -> Decoder:
    decoder = Decoder(ModelConfig("llama", VOCAB, HIDDEN, 16, 2, 2, 1, 6, 64)).double()
    decoder.initialise(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(10)
    return decoder.requires_grad_(False)


def make_head(**changes: object) -> MedusaHead:
    head = MedusaHead(replace(MedusaConfig(HIDDEN, VOCAB, 2, 3, 2), **changes), DraftVocabulary.whole(VOCAB)).double()  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return head


def make_batch() -> HeadBatch:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (2, ROWS + 1), generator=generator)
    normed = torch.randn(2, ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    return HeadBatch(tokens, torch.rand(tokens.shape, generator=generator) < 0.7, {2: normed}, normed)


def twin(head: MedusaHead, target: Decoder, number: int, state: Tensor, tokens: list[int]) -> Tensor:
    """Logits [V] of head `number` from one state and the tokens behind it."""
    weights, x = dict(head.state_dict()), state
    for block in range(head.config.num_blocks):
        seen = x
        if head.config.is_sequential and block == 0:
            seen = torch.cat((x, *(target.embedding.weight[token] for token in tokens[: number + 1])))
        inner = weights[f"{number}.{block}.linear.weight"] @ seen + weights[f"{number}.{block}.linear.bias"]
        x = x + inner * torch.sigmoid(inner)
    output = weights.get(f"{number}.{head.config.num_blocks}.weight")
    return target.lm_head.weight @ x if output is None else output @ x


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("own_output", [False, True])
def test_training_places_are_those_of_the_twin(sequential: bool, own_output: bool) -> None:
    """Head k at row t is compared with the target's row t + 1 + k, that of the token at t + 2 + k."""
    head = make_head(is_sequential=sequential, has_own_output=own_output)
    target, batch = make_target(), make_batch()
    places = list(head.places(batch, target, 5, seed=0))
    assert [place.number for place in places] == [0, 1, 2]
    for place in places:
        expected = {
            window * ROWS + row
            for window in range(2)
            for row in range(place.number + 1, ROWS)
            if batch.wanted[window, row + 1]
        }
        assert set(place.rows.tolist()) == expected
        for logits, flat in zip(place.logits, place.rows.tolist(), strict=True):
            window, row = divmod(flat, ROWS)
            before = row - 1 - place.number
            tokens = batch.tokens[window, before + 1 :].tolist()
            own = twin(head, target, place.number, batch.normed[window, before], tokens)
            torch.testing.assert_close(logits, own, atol=1e-10, rtol=1e-10)


def test_heads_begin_as_the_targets_own_output() -> None:
    head, target = make_head(), make_target()
    head.initialise(0)
    head.begin_from(target.output_logits)
    state = torch.randn(4, HIDDEN, dtype=torch.float64)
    for number in range(3):
        torch.testing.assert_close(head.predict(number, state, None, target), target.output_logits(state))


def test_a_vocabulary_of_another_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        MedusaHead(MedusaConfig(HIDDEN, VOCAB, 2), DraftVocabulary.whole(VOCAB + 1))


def test_windows_too_short_for_a_place_have_none() -> None:
    batch = make_batch()
    short = HeadBatch(
        batch.tokens[:, :3], torch.ones(2, 3, dtype=torch.bool), {2: batch.normed[:, :2]}, batch.normed[:, :2]
    )
    places = list(make_head().places(short, make_target(), 3, seed=0))
    assert [place.rows.tolist() for place in places] == [[1, 3]]
