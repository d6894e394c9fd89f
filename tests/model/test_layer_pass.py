"""All layers in one compiled call: bit for bit the decoder's own layers, and rows as plain decoding has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.model import decoder as decoder_module
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.interface import EarlySegment, ForwardOutput, Segment
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import ONE_OF_EACH, USUAL, VARIANTS, token_ids, variant
from tests.helpers.compiled_pass import note_passes
from tests.helpers.usual import some_of

TREE = (-1, 0, -1, 2, 2)
LINES = ([0, 1, 2], [0, 3, 4], [0, 3, 5])  # rows from the pending one to each leaf
# Every variant in bf16; in int4 the products are others, and the rest of the pass is the same.
CASES = some_of(
    itertools.product(sorted(VARIANTS), ("auto", "int4")),
    {*((name, "auto") for name in VARIANTS), *((name, "int4") for name in USUAL)},
)


@pytest.fixture(autouse=True)
def own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bf16 matrices, also on a processor where oneDNN's are taken."""
    monkeypatch.setattr("foretoken.model.layers.has_amx", lambda: False)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward had a compiled pass."""
    return note_passes(monkeypatch, decoder_module)


def opened(folder: Path, name: str, weights: str) -> PagedModel:
    options = {} if name == "llama-llama3" else {"head_dim": 16}
    dtype = "bfloat16" if weights == "auto" else "float32"
    model = open_model(variant(folder, name, **options), dtype, cache_tokens=256, weights=weights)
    assert isinstance(model, PagedModel)
    return model


def answers(model: PagedModel) -> list[Tensor]:
    """Of a chain behind a prompt, a tree and a second sequence in one batch, with taps."""
    found, text = [], token_ids(20)
    model.open(0)
    model.open(1)
    out = model.forward(torch.tensor(text[:12]), [Segment(0, 12, (), 12)])
    model.commit(0, 12)
    found += [out.logits]
    segments = [Segment(0, 1, TREE, 6, num_taps=6), Segment(1, 2, (), 1, num_taps=2)]  # not of every row
    out = model.forward(torch.tensor(text[12:]), segments, taps=(0, 1, 3))
    found += [out.logits, *out.taps.values()]
    model.close(0)
    model.close(1)
    return found


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_the_pass_equals_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool], name: str, weights: str
) -> None:
    model = opened(tmp_path / name, name, weights)
    with monkeypatch.context() as patch:  # norm and output matrix are in the same call
        patch.setattr(Decoder, "logits", lambda *_: pytest.fail("logits of their own"))
        together = answers(model)
    assert all(passes)
    monkeypatch.setattr(decoder_module, "layer_pass", lambda *_, **__: None)
    for found, expected in zip(together, answers(model), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "weights"),
    some_of(
        itertools.product(ONE_OF_EACH, ("auto", "int4")),
        {*((name, "auto") for name in ONE_OF_EACH), ("llama", "int4"), ("gemma2", "int4"), ("qwen3-moe", "int4")},
    ),
)
def test_draft_tokens_get_the_bits_of_plain_decoding(
    tmp_path: Path, passes: list[bool], name: str, weights: str
) -> None:
    """Default numerics: every line of a tree, beside another sequence, against one token at a time."""
    model = opened(tmp_path / "m", name, weights)
    text = token_ids(20)

    def begun() -> None:
        model.open(0)
        model.forward(torch.tensor(text[:9]), [Segment(0, 9)])
        model.commit(0, 9)

    begun()
    model.open(1)
    out = model.forward(torch.tensor(text[9:17]), [Segment(1, 2), Segment(0, 1, TREE, 6)])
    tree = out.logits[-6:]
    model.close(0)
    model.close(1)
    for line in LINES:
        begun()
        for row in line:
            alone = model.forward(torch.tensor([text[11 + row]]), [Segment(0, 1)]).logits
            model.commit(0, 1)
            assert torch.equal(alone[0], tree[row])
        model.close(0)
    assert all(passes)


def test_layers_that_run_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool]) -> None:
    model = opened(tmp_path / "m", "llama", "auto")

    def early() -> ForwardOutput:
        model.open(0)
        model.forward(torch.tensor(token_ids(6)), [Segment(0, 6)])
        model.commit(0, 6)
        drafted = model.forward_early(torch.tensor([3, 5]), [EarlySegment(0, 0, 2)], layers=[0, 2])
        out = model.forward(torch.tensor([3, 5, 8]), [Segment(0, 1, (-1, 0), 3)])
        model.close(0)
        return ForwardOutput(torch.cat((drafted, out.logits)), {})

    together = early().logits
    assert all(passes)
    monkeypatch.setattr(decoder_module, "layer_pass", lambda *_, **__: None)
    assert torch.equal(early().logits, together)


def test_who_has_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[bool]) -> None:
    """Plain matrices, other attention, no compiler."""

    def ran(model: PagedModel, tokens: Sequence[int] = (1, 2)) -> bool:
        model.open(7)
        model.forward(torch.tensor(tokens), [Segment(7, len(tokens))])
        model.close(7)
        return passes[-1]

    assert not ran(open_model(variant(tmp_path / "a", "llama"), "float32", cache_tokens=64))  # type: ignore[arg-type]
    model = opened(tmp_path / "c", "llama", "auto")
    assert ran(model)
    assert ran(model, token_ids(60))
    model.attention = BatchedAttention
    assert not ran(model)
    model = opened(tmp_path / "d", "llama", "auto")
    monkeypatch.setattr("foretoken.model.row_kernels.row_kernels", lambda: None)
    assert not ran(model)


def test_weights_that_were_replaced(tmp_path: Path, passes: list[bool]) -> None:
    """A head or a target may be packed anew: what the table pointed to is gone."""
    model, other = (opened(tmp_path / name, "llama", "auto") for name in ("a", "b"))
    model.open(0)
    before = model.forward(torch.tensor([1, 2]), [Segment(0, 2)]).logits
    for layer, source in zip(model.decoder.layers, other.decoder.layers, strict=True):
        for name in ("qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            own, packed = layer.get_submodule(name), source.get_submodule(name).packed
            if name == "mlp.down_proj":
                packed = type(packed)(-packed.weights, packed.num_rows, packed.width)
            own.hold(packed)
    after = model.forward(torch.tensor([1, 2]), [Segment(0, 2)]).logits
    assert all(passes)
    assert not torch.equal(before, after)
