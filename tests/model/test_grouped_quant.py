"""A checkpoint quantised at load: nearest codes, the twin's decoder, the same bits in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.config import QUANTISED
from foretoken.errors import ConfigError
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.layers import Embedding, Linear
from foretoken.model.loader import load_decoder
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.grouped_kernel import GroupedWeight
from foretoken.model.matrices.quant import GroupQuantiser, grouped_bytes, grouped_codes
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant


def test_codes_are_the_nearest() -> None:
    """Half a step off at most; in 4 bits a whole one at the end that has no code. Zeros stay zeros."""
    weight = torch.randn(40, 64) * torch.logspace(-2, 2, 40)[:, None]
    weight[::2, ::3] = 0
    weight[5] = 0
    for kind, steps in (("int8", 0.51), ("int4", 1.01)):
        grouped = grouped_codes(weight, kind)
        off = (grouped.dequantised() - weight).abs() / grouped.scales.abs().repeat_interleave(32, 1)
        assert off.max() <= steps
        assert (grouped.dequantised()[weight == 0] == 0).all()
        assert torch.equal(grouped.scales.half().float(), grouped.scales)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize(("num_rows", "width"), [(601, 64), (33, 48), (256, 32), (5, 24)])
def test_a_matrix_in_pieces_is_that_of_one_piece(kind: str, num_rows: int, width: int) -> None:
    """Pieces end anywhere; an input size that 32 does not divide is filled up."""
    weight, x = torch.randn(num_rows, width).bfloat16(), torch.randn(4, width)
    packed = GroupQuantiser(kind, torch.bfloat16).matrix(weight.split(num_rows // 3 + 1))
    whole = GroupedWeight.of(grouped_codes(weight.float(), kind), torch.bfloat16, width)
    assert torch.equal(packed.codes, whole.codes)
    assert torch.equal(packed.scales, whole.scales)
    assert torch.equal(packed.multiply(x, None), whole.multiply(x, None))
    assert packed.rows(torch.tensor([num_rows - 1])).shape == (1, width)
    assert packed.nbytes == grouped_bytes(kind, num_rows, width)
    expected = x @ weight.float().T
    assert (packed.multiply(x, None) - expected).norm() < (0.02 if kind == "int8" else 0.15) * expected.norm()


def extend(model: LanguageModel, sequence: int, tokens: list[int], num_draft: int = 0) -> Tensor:
    """Logits of all rows: committed tokens, or one and a chain of draft tokens."""
    parents = tuple(range(-1, num_draft - 1))
    segment = Segment(sequence, len(tokens) - num_draft, parents, len(tokens))
    return model.forward(torch.tensor(tokens), [segment]).logits


def by_token(model: LanguageModel, text: list[int]) -> Tensor:
    """Logits [n, V] of decoding one token after the other."""
    model.open(0)
    found = []
    for token in text:
        found.append(extend(model, 0, [token]))
        model.commit(0, 1)
    model.close(0)
    return torch.cat(found)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases", "qwen3"])
def test_a_quantised_decoder_is_that_of_the_twin(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged matrices, biases, a tied head: the same bits without the compiled kernel."""
    folder, text = variant(tmp_path, name, hidden_size=64), token_ids(12)
    decoder = load_decoder(folder, quant=kind)
    assert all(
        isinstance(module.packed, GroupedWeight)
        for module in decoder.modules()
        if isinstance(module, Linear | Embedding)
    )
    model = PagedModel(decoder, 256)
    found = by_token(model, text)
    monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
    assert torch.equal(by_token(model, text), found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", QUANTISED)
def test_strict_numerics_of_quantised_weights(tmp_path: Path, kind: str, dtype: str) -> None:
    """A verification pass, a prompt and single rows: bitwise the same logits, alone and beside another text."""
    folder, text = tiny_checkpoint(tmp_path, "llama", hidden_size=64), token_ids(40)
    model = open_model(folder, dtype, cache_tokens=512, numerics="strict", weights=kind)
    expected = by_token(model, text)
    for num_draft in (1, 3, 8, 17):
        model.open(1)
        model.open(2)
        extend(model, 1, text[:7])
        model.commit(1, 7)
        extend(model, 2, text[:3])
        model.commit(2, 3)
        rows, beside = text[7 : 8 + num_draft], text[3:9]
        chains = [
            Segment(1, 1, tuple(range(-1, num_draft - 1)), len(rows)),
            Segment(2, 1, tuple(range(-1, len(beside) - 2)), len(beside)),
        ]
        logits = model.forward(torch.tensor(rows + beside), chains).logits
        assert torch.equal(logits[: len(rows)], expected[7 : 8 + num_draft])
        assert torch.equal(logits[len(rows) :], expected[3:9])
        model.close(1)
        model.close(2)
    model.open(1)
    assert torch.equal(extend(model, 1, text), expected)
    model.close(1)


def test_what_is_quantised_is_smaller_and_close(tmp_path: Path) -> None:
    folder, text = tiny_checkpoint(tmp_path, "llama", hidden_size=128, intermediate_size=256), token_ids(20)
    found = {kind: open_model(folder, "float32", cache_tokens=64, weights=kind) for kind in ("auto", *QUANTISED)}
    sizes = {kind: model.weight_bytes for kind, model in found.items()}
    assert sizes["int4"] < sizes["int8"] < 0.4 * sizes["auto"]
    logits = {kind: by_token(model, text) for kind, model in found.items()}
    apart = {kind: float((logits[kind] - logits["auto"]).norm() / logits["auto"].norm()) for kind in QUANTISED}
    assert 0 < apart["int8"] < 0.05 < apart["int4"] < 0.4


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    from foretoken import LLM

    with pytest.raises(ConfigError, match="weights='int3': choose one of auto, int8, int4"):
        LLM(str(tmp_path), weights="int3")
