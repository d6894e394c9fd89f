"""What learning makes of a head, and how weights get in and out of one that is in use."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foretoken.adapt.adaptation import HeadLearner, _FrozenTarget
from foretoken.adapt.buffer import Window
from foretoken.config import QUANTISED
from foretoken.heads import weights as head_weights
from foretoken.heads.base import Head, HeadBatch
from foretoken.heads.weights import held_in, numbers, plain_copy, replace_weights, weights_of
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.hf import TransformersModel
from foretoken.model.layers import Linear, can_pack
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from tests.adapt.small_heads import KINDS, drafter_of, small_head
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.usual import some_of


@pytest.fixture(scope="module")
def decoder(pair: SimpleNamespace) -> Decoder:
    return load_decoder(pair.target, dtype="float32").requires_grad_(False)


NUM_TEXTS, LENGTH = 3, 48


@pytest.fixture(scope="module")
def texts(decoder: Decoder) -> list[Window]:
    """Repeating texts of the target's, sampled."""
    layers = tuple(range(decoder.config.num_layers + 1))
    wanted = torch.tensor([place >= 4 for place in range(LENGTH + 1)])
    windows = []
    for number in range(NUM_TEXTS):
        tokens = (token_ids(8, seed=number) * 20)[: LENGTH + 1]
        with torch.no_grad():
            hidden = decoder(
                torch.tensor(tokens[:-1]),
                torch.arange(LENGTH),
                PackedAttention(decoder.config, 1, LENGTH),
                taps=layers,
            )
        windows.append(Window(torch.tensor(tokens), wanted, hidden.taps, False, 0, number))
    return windows


@pytest.mark.parametrize("kind", KINDS)
def test_learning_raises_the_score_of_other_text(decoder: Decoder, texts: list[Window], kind: str) -> None:
    head, target = small_head(kind, decoder.config), PagedModel(decoder, 256, 16)
    fixed = drafter_of(head, target).fixed_weights
    learner, before = HeadLearner(head, target, fixed), weights_of(head)
    in_use, judged = learner.weights(), texts[1]
    low = learner.score(in_use, judged)
    for number in range(60):
        learner.learn(replace(texts[number % NUM_TEXTS], number=number))
    learnt = learner.weights()
    assert learner.score(learnt, judged) > low + 0.02
    assert learner.score(in_use, judged) == low, "judging one version does not disturb another"
    assert all(torch.equal(own, before[name]) for name, own in weights_of(head).items()), "the head in use is not"
    assert set(before) - set(learnt) == {name for name in before if fixed and name.startswith(fixed)}
    learner.restart(in_use)
    assert learner.score(learner.weights(), judged) == low


@pytest.mark.parametrize("kind", KINDS)
def test_the_score_is_what_the_places_say(decoder: Decoder, texts: list[Window], kind: str) -> None:
    head, target = small_head(kind, decoder.config), PagedModel(decoder, 256, 16)
    learner = HeadLearner(head, target, ())
    for is_greedy in (True, False):
        one = replace(texts[2], is_greedy=is_greedy)
        with torch.no_grad():
            normed = decoder.final_norm(one.states[decoder.config.num_layers])
            states = {layer: rows[None] for layer, rows in one.states.items()}
            batch = HeadBatch(one.tokens[None], one.wanted[None], states, normed[None])
            expected, chance = 1.0, 1.0
            for place in head.places(batch, decoder, 4, seed=0):
                p = decoder.output_logits(normed[place.rows]).softmax(-1)
                q = head.vocabulary.expand(place.logits).softmax(-1)
                same = (p.argmax(-1) == q.argmax(-1)).float()
                chance *= float((same if is_greedy else torch.minimum(p, q).sum(-1)).mean())
                expected += chance
        assert learner.score(learner.weights(), one) == pytest.approx(expected, abs=1e-5)


def pack(head: Head) -> None:
    """As for inference, where the processor has packed matrices."""
    for module in head.modules():
        if isinstance(module, Linear):
            module.pack()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_packed_head_can_be_read_and_replaced(decoder: Decoder, kind: str) -> None:
    plain, packed = (small_head(kind, decoder.config).to(torch.bfloat16) for _ in range(2))
    pack(packed)
    assert not can_pack() or len(list(packed.parameters())) < len(list(plain.parameters()))
    expected = dict(plain.named_parameters())
    found = weights_of(packed)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], own) for name, own in expected.items())
    copied = dict(plain_copy(packed).named_parameters())
    assert all(torch.equal(copied[name], own.float()) for name, own in expected.items())
    new = {name: own + 1 for name, own in expected.items()}
    replace_weights(packed, new)
    assert all(torch.equal(own, new[name]) for name, own in weights_of(packed).items())
    assert not can_pack() or any(module.packed is not None for module in packed.modules() if isinstance(module, Linear))


@pytest.mark.parametrize(
    ("kind", "bits"),
    some_of(
        itertools.product(KINDS, QUANTISED),
        {("medusa:hydra", "int8"), ("block:cut", "int8"), ("eagle1", "int8"), ("medusa", "int4"), ("eagle", "int4")},
    ),
)
def test_a_quantised_head_learns_in_numbers_and_hands_out_codes(
    decoder: Decoder, texts: list[Window], kind: str, bits: str
) -> None:
    """What is judged is what would be in use; swapped in, it is bit for bit what was judged. In 4 bits some
    of a few updates is lost to rounding: that codes change is all that is asked there.
    """
    head, target = small_head(kind, decoder.config), PagedModel(decoder, 256, 16)
    head_weights.pack(head, bits)
    in_use = weights_of(head)
    formats = {name: held_in(own) for name, own in in_use.items()}
    assert bits in formats.values()
    fixed = drafter_of(head, target).fixed_weights
    learner, judged = HeadLearner(head, target, fixed), texts[1]
    began = learner.weights()
    assert all(torch.equal(numbers(own), numbers(in_use[name])) for name, own in began.items())
    low = learner.score(began, judged)
    for number in range(60):
        learner.learn(replace(texts[number % NUM_TEXTS], number=number))
    learnt = learner.weights()
    assert {name: held_in(own) for name, own in learnt.items()} == {name: formats[name] for name in learnt}
    assert any(not torch.equal(numbers(own), numbers(began[name])) for name, own in learnt.items())
    assert bits == "int4" or learner.score(learnt, judged) > low + 0.02
    replace_weights(head, learnt)
    assert all(torch.equal(numbers(own), numbers(weights_of(head)[name])) for name, own in learnt.items())
    learner.restart(began)
    assert learner.score(learner.weights(), judged) == low


def test_gradients_pass_through_a_packed_output_matrix(decoder: Decoder) -> None:
    """Packed matrices know no gradients."""
    plain = load_decoder_like(decoder)
    packed = load_decoder_like(decoder)
    packed.lm_head.pack()
    rows = torch.randn(5, decoder.config.hidden_size)
    gradients = []
    for one in (plain, packed):
        leaf = rows.clone().requires_grad_(True)
        logits = _FrozenTarget(PagedModel(one, 64, 16), torch.bfloat16).output_logits(leaf)
        (logits.float().square().sum() / 2).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.05, atol=0.05)


def test_gradients_of_a_capped_output_are_those_of_what_the_target_computes(decoder: Decoder) -> None:
    """Gemma 2 caps its logits; learning took the product of the output matrix in their place."""
    capped = Decoder(dataclasses.replace(decoder.config, logit_softcap=0.5)).requires_grad_(False)
    capped.load_state_dict(decoder.state_dict())
    rows = torch.randn(5, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, found = (rows.clone().requires_grad_(True) for _ in range(2))
    logits = capped.output_logits(expected)
    learnt = _FrozenTarget(PagedModel(capped, 64, 16), torch.float32).output_logits(found)
    torch.testing.assert_close(learnt, logits, rtol=1e-4, atol=1e-5)
    assert logits.abs().max() > 0.45, "the cap shows"
    for one in (logits, learnt):
        one.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


def test_gradients_of_an_output_matrix_with_a_bias_are_those_of_what_the_target_computes(tmp_path: Path) -> None:
    """Phi's output matrix has one: it was learnt from once for every channel of a row."""
    target = TransformersModel(tiny_checkpoint(tmp_path, "phi"), "float32")
    output = target._part(target._model.get_output_embeddings(), "output matrix")
    assert output.bias.std() > 0.1, "the bias shows"
    rows = torch.randn(5, output.weight.shape[1], generator=torch.Generator().manual_seed(0))
    expected, found = (rows.clone().requires_grad_(True) for _ in range(2))
    logits, learnt = output(expected), _FrozenTarget(target, torch.float32).output_logits(found)
    torch.testing.assert_close(learnt, logits, rtol=1e-4, atol=1e-5)
    for one in (logits, learnt):
        one.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5)


def load_decoder_like(decoder: Decoder) -> Decoder:
    """The same weights in bfloat16."""
    twin = Decoder(decoder.config)
    twin.load_state_dict(decoder.state_dict())
    assert isinstance(twin, nn.Module)
    return twin.to(torch.bfloat16).requires_grad_(False)
