"""A new EAGLE head begins as the target's last layer."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foretoken.heads.base import DraftVocabulary
from foretoken.heads.checkpoint import make_head
from foretoken.heads.config import EagleConfig
from foretoken.heads.eagle import EagleHead
from foretoken.model.attention.paged import PackedAttention
from foretoken.train.head_recipes import EagleShape, begin_as_last_layer, new_head, recipe_of
from tests.train.tiny import VOCABULARY, tiny_target


@pytest.mark.parametrize("version", [1, 3])
def test_its_layer_computes_what_the_last_one_does(version: int) -> None:
    target = tiny_target()
    shape = EagleShape(version=version)
    head = new_head(shape, target, torch.ones(VOCABULARY), [0], seed=3)
    assert isinstance(head, EagleHead)
    decoder, width = target.decoder, target.decoder.config.hidden_size
    attention = head.decoder_layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert projection.weight is not None
        assert version == 1 or float(projection.weight[:, :width].detach().abs().max()) > 0, (
            "it reads the embedding too"
        )
        projection.weight.data[:, :-width] = 0.0
    x, positions = torch.randn(9, width), torch.arange(9)
    own = PackedAttention(head.config.layer, 1, 9)
    with torch.inference_mode(False), torch.no_grad():
        rotary = head.rotary.at(positions)
        found = head.decoder_layers[0](x, torch.randn(9, width), rotary, own, 0)
        theirs = PackedAttention(decoder.config, 1, 9)
        expected = decoder.layers[-1](x, decoder.rotaries[0].at(positions), theirs, decoder.config.num_layers - 1)
    if version == 3:  # version 1 has no norm in front of its attention
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    states = {layer: torch.randn(4, width) for layer in head.hidden_layers()}
    if version == 3:
        torch.testing.assert_close(head.features(states, decoder), states[head.hidden_layers()[-1]])


@pytest.mark.parametrize("change", [{"fc_norm": True}, {"norm_before_residual": True}, "narrow", "family"])
def test_what_differs_begins_at_random(change: object) -> None:
    target = tiny_target()
    config = recipe_of(EagleShape()).config(EagleShape(), target.decoder.config, VOCABULARY)
    assert isinstance(config, EagleConfig)
    if isinstance(change, dict):
        config = dataclasses.replace(config, **change)
    elif change == "narrow":
        layer = dataclasses.replace(config.layer, intermediate_size=16)
        config = dataclasses.replace(config, layer=layer)
    else:
        target.decoder.config = dataclasses.replace(target.decoder.config, attention_softcap=30.0)
    head = make_head(config, DraftVocabulary.whole(VOCABULARY))
    assert isinstance(head, EagleHead)
    head.initialise(0)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    assert not begin_as_last_layer(head, target.decoder)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
