"""GGUF files through the kernel: the file's own codes, formats that differ within one merged matrix, any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.model.gguf.weights import GgufWeights
from foretoken.model.layers import Embedding, Linear
from foretoken.model.loader import load_decoder
from foretoken.model.matrices import grouped_kernel
from foretoken.model.matrices.grouped_kernel import GroupedWeight, MergedWeight
from foretoken.model.open import open_model
from tests.helpers.checkpoints import token_ids, variant
from tests.helpers.gguf_files import QUANTISED, write_gguf
from tests.model.test_grouped_quant import by_token, extend


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_file_s_codes_are_multiplied_as_they_are(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix stands for the file's own numbers; strict logits are single rows', and those of the twin."""
    folder = variant(tmp_path / "hf", "llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1)
    path, text = write_gguf(tmp_path / "model.gguf", folder, kind), token_ids(12)
    model = open_model(path, cache_tokens=128, numerics="strict")
    decoder, weights = model.decoder, GgufWeights(path)  # type: ignore[attr-defined]
    packed = {name: module.packed for name, module in decoder.named_modules() if isinstance(module, Linear | Embedding)}
    assert all(isinstance(weight, GroupedWeight | MergedWeight) for weight in packed.values())
    table = decoder.embedding.packed
    name = "model.embed_tokens.weight"
    assert torch.equal(table.rows(torch.arange(table.num_rows)), weights.read(name, weights.shape(name)))
    parts = packed["layers.0.qkv_proj"].parts
    for part, short in zip(parts, "qkv", strict=True):
        name = f"model.layers.0.self_attn.{short}_proj.weight"
        assert torch.equal(part.rows(torch.arange(part.num_rows)), weights.read(name, weights.shape(name)))
    expected = by_token(model, text)
    model.open(1)
    extend(model, 1, text[:4])
    model.commit(1, 4)
    assert torch.equal(extend(model, 1, text[4:], num_draft=len(text) - 5), expected[4:])
    model.close(1)
    monkeypatch.setattr(grouped_kernel, "kernel", lambda: None)
    assert torch.equal(by_token(model, text), expected)


def test_weights_to_train_or_to_write_are_numbers(tmp_path: Path) -> None:
    folder = variant(tmp_path / "hf", "llama", hidden_size=256)
    decoder = load_decoder(write_gguf(tmp_path / "model.gguf", folder, "Q8_0"), pack=False)
    assert all(module.packed is None for module in decoder.modules() if isinstance(module, Linear | Embedding))


def test_greedy_answers_of_a_file_are_plain_s(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", variant(tmp_path / "hf", "llama", hidden_size=256), "Q4_K")
    prompts, params = [token_ids(9, seed=i) * 2 for i in range(4)], SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(path, SpecConfig(), numerics="strict") as llm:
        plain = [out.token_ids for out in llm.generate(prompts, params)]
        for spec in (SpecConfig("ngram", num_draft=6), SpecConfig("early_exit", exit_layer=1, num_draft=3)):
            assert [out.token_ids for out in llm.generate(prompts, params, spec=spec)] == plain
