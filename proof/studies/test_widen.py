"""A widened checkpoint computes the small one's logits, and is an ordinary checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.errors import InputError, StorageError
from foretoken.model.architecture import ModelConfig
from foretoken.model.attention.paged import PackedAttention
from foretoken.model.decoder import Decoder
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.weights import Weights
from foretoken.text.tokenizer import load_tokenizer
from studies.widen.checkpoint import widen
from studies.widen.plan import PRESETS, plan
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids, transformers_logits, variant
from tests.helpers.gguf_files import write_gguf
from tests.model.test_loader import tied_with_head

SIZE = "hidden=192,intermediate=160,layers=5,heads=8,kv_heads=4"


def logits(folder: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return _of(load_decoder(folder, dtype=dtype), ids)


def _of(decoder: Decoder, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return decoder.logits(
            decoder(torch.tensor(ids), torch.arange(len(ids)), PackedAttention(decoder.config, 1, len(ids))).last
        )


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied",
        "llama-mqa",
        "llama-biases",
        "llama-head-dim",
        "llama-yarn",
        "mistral-sliding",
        "qwen2-tied",
        "qwen2-layer-types",
        "qwen3",
    ],
)
def test_logits_are_the_small_models(tmp_path: Path, name: str) -> None:
    source, ids = variant(tmp_path / "small", name), token_ids(60)
    made = widen(source, tmp_path / "big", SIZE, dtype="float32")
    small = logits(source, ids)
    torch.testing.assert_close(logits(made.folder, ids), small, atol=1e-4, rtol=0)
    torch.testing.assert_close(transformers_logits(made.folder, ids), small, atol=1e-4, rtol=0)
    assert read_config(made.folder).model_type == read_config(source).model_type
    assert made.num_parameters == read_config(made.folder).num_parameters


@pytest.mark.parametrize(
    "size",
    [
        "hidden=96,heads=8,kv_heads=2",  # larger groups: dead query heads read live values
        "hidden=48,heads=8,kv_heads=8",  # smaller groups: a live key/value head is needed twice
        "hidden=144,heads=12,kv_heads=4",  # both counts odd multiples
        "layers=7",
        "intermediate=65",
        "hidden=480",
    ],
)
def test_every_way_to_grow_keeps_the_function(tmp_path: Path, size: str) -> None:
    source, ids = tiny_checkpoint(tmp_path / "small", "llama", attention_bias=True, mlp_bias=True), token_ids(40)
    made = widen(source, tmp_path / "big", size, dtype="float32")
    torch.testing.assert_close(logits(made.folder, ids), logits(source, ids), atol=1e-4, rtol=0)


def test_bfloat16_is_as_close_as_summation_order_allows(tmp_path: Path) -> None:
    source, ids = (
        tiny_checkpoint(tmp_path / "small", "llama", dtype=torch.bfloat16, tie_word_embeddings=True),
        token_ids(60),
    )
    made = widen(source, tmp_path / "big", SIZE)
    small, big = (logits(folder, ids, torch.bfloat16).float() for folder in (source, made.folder))
    assert (small - big).abs().max() < 0.03 * small.abs().max()
    assert (small.argmax(-1) == big.argmax(-1)).float().mean() > 0.9
    # In float32 the bfloat16 weights are the very same numbers.
    torch.testing.assert_close(logits(made.folder, ids), logits(source, ids), atol=1e-4, rtol=0)


def test_a_gguf_file_is_widened_with_its_tokenizer(tmp_path: Path) -> None:
    """Heads' channels in the order of Hugging Face, special tokens and chat template kept."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    folder = tiny_tokenizer(tiny_checkpoint(tmp_path / "plain", "llama", vocab_size=300), 300, chat_template=template)
    file, ids = write_gguf(tmp_path / "small.gguf", folder, tokenizer=True), token_ids(60)
    made = widen(file, tmp_path / "big", SIZE, dtype="float32")
    small = load_decoder(file, dtype=torch.float32, pack=False)
    torch.testing.assert_close(logits(made.folder, ids), _of(small, ids), atol=1e-4, rtol=0)
    ours, theirs = load_tokenizer(made.folder), load_tokenizer(file)
    messages = [{"role": "user", "content": "the list"}]
    assert ours.encode("def the list <|endoftext|>") == theirs.encode("def the list <|endoftext|>")
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "[user]the list[assistant]"
    assert ours.eos_token_id == theirs.eos_token_id


def test_dead_weights_do_not_matter_and_are_not_zero(tmp_path: Path) -> None:
    source, ids = tiny_checkpoint(tmp_path / "small", "qwen3"), token_ids(40)
    one, two = (widen(source, tmp_path / str(seed), SIZE, seed=seed, dtype="float32") for seed in (1, 2))
    left, right = Weights(one.folder), Weights(two.folder)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(left.read(name, left.shape(name)), right.read(name, right.shape(name)))
    torch.testing.assert_close(logits(one.folder, ids), logits(two.folder, ids), atol=1e-4, rtol=0)
    assert one.nonzero_share > 0.85
    assert one.dead_share > 0.8
    tensors = [left.read(name, left.shape(name)) for name in left.names]
    assert one.nonzero_share == pytest.approx(
        sum(int(t.count_nonzero()) for t in tensors) / sum(t.numel() for t in tensors)
    )


def test_the_folder_is_complete_and_says_what_it_is(tmp_path: Path) -> None:
    source = tiny_tokenizer(tiny_checkpoint(tmp_path / "small", "llama"))
    seen: list[tuple[int, int]] = []
    made = widen(
        source,
        tmp_path / "big",
        SIZE,
        seed=3,
        progress=lambda done, total: seen.append((done, total)),
        shard_bytes=100_000,
    )
    note = json.loads((made.folder / "widening.json").read_text())
    assert note["source"] == "small"
    assert note["seed"] == 3
    assert note["to"] == SIZE
    assert 0 < note["nonzero_share"] <= 1
    assert len(list(made.folder.glob("model-*-of-*.safetensors"))) > 2
    assert (made.folder / "tokenizer.json").exists()
    assert seen[-1] == (made.num_parameters, made.num_parameters)
    assert seen == sorted(seen)
    assert [path.name for path in tmp_path.iterdir() if "writing" in path.name] == []
    torch.testing.assert_close(logits(made.folder, token_ids(20)), logits(source, token_ids(20)), atol=0.1, rtol=0)


REFERENCE = ModelConfig("llama", 4096, 256, 640, 8, 4, 2, 64, 2048, tie_embeddings=True)
DRAFT = replace(REFERENCE, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1)
QWEN = ModelConfig("qwen2", 151_936, 896, 4864, 24, 14, 2, 64, 32_768, qkv_bias=True, tie_embeddings=True)


@pytest.mark.parametrize(
    ("source", "preset"),
    [
        *((REFERENCE, name) for name in PRESETS),
        *((DRAFT, name) for name in PRESETS),
        (QWEN, "1b"),
        (QWEN, "3b"),
        (QWEN, "8b"),
    ],
)
def test_presets_reach_their_size(source: ModelConfig, preset: str) -> None:
    big = plan(source, preset).config
    assert big.num_parameters == pytest.approx(PRESETS[preset].parameters, rel=0.03)
    assert big.hidden_size % big.num_heads == 0
    assert (big.head_dim, big.vocab_size) == (source.head_dim, source.vocab_size)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("2b", "choose a preset"),
        ("width=9", "unknown key 'width'"),
        ("hidden=x", "whole number"),
        ("hidden=49", "multiple of the source's 48"),
        ("layers=2", "below the source's 3"),
        ("heads=6,kv_heads=4", "multiple of kv_heads"),
        ("heads=16,kv_heads=2,hidden=144,layers=3", None),
        ("hidden=144,heads=10,kv_heads=2", "multiple of heads=10"),
        ("heads=4,kv_heads=3", "multiple of kv_heads"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(tmp_path: Path, to: str, message: str | None) -> None:
    source = read_config(tiny_checkpoint(tmp_path, "llama"))
    if message is None:
        plan(source, to)
        return
    with pytest.raises(InputError, match=message):
        plan(source, to)


def test_a_source_above_the_preset_is_refused() -> None:
    with pytest.raises(InputError, match="parameters already"):
        plan(QWEN, "150m")


def test_unwritable_places_are_storage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "small", "llama")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(StorageError, match="exists already"):
        widen(source, tmp_path / "used", SIZE)
    with pytest.raises(StorageError, match="cannot write"):
        widen(source, tmp_path / "used" / "file" / "out", SIZE)
    usage: Any = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(StorageError, match="GB free"):
        widen(source, tmp_path / "full", SIZE)
    assert not (tmp_path / "full").exists()


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(tmp_path / "small", "llama")

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("studies.widen.checkpoint.save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        widen(source, tmp_path / "big", SIZE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_a_widened_copy_keeps_a_head_of_its_own(tmp_path: Path) -> None:
    folder, ids = tied_with_head(tmp_path / "in", "llama", equal=False), token_ids(20)
    widen(folder, tmp_path / "out", "hidden=96,intermediate=128,layers=4,heads=8,kv_heads=4", dtype="float32")
    torch.testing.assert_close(logits(tmp_path / "out", ids), transformers_logits(folder, ids), atol=1e-3, rtol=0)
