"""A model in several GGUF files, beside the same model in one."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import CheckpointError
from foretoken.measure.eval.identity import identity_of
from foretoken.model.gguf.parts import part_files, read_header
from foretoken.model.gguf.weights import GgufWeights
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.answers import folder_fingerprint
from tests.helpers.checkpoints import tiny_tokenizer, variant
from tests.helpers.gguf_files import finish, write_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts") / "hf"
    return tiny_tokenizer(variant(folder, "llama", vocab_size=300, hidden_size=64))


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "model.gguf", source, "Q8_0", tokenizer=True, tensors_per_part=9)
    return sorted(tmp_path.glob("*.gguf"))


def test_any_part_is_the_model(source: Path, parts: list[Path], tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", source, "Q8_0", tokenizer=True)
    expected = GgufWeights(whole)
    assert len(parts) > 2
    assert parts[0].name == f"model-00001-of-{len(parts):05}.gguf"
    for path in (parts[0], parts[1], parts[-1]):
        assert part_files(path) == parts
        weights = GgufWeights(path)
        assert sorted(weights.names) == sorted(expected.names)
        for name in weights.names:
            assert torch.equal(weights.read(name, weights.shape(name)), expected.read(name, expected.shape(name)))
        assert weights.config() == expected.config()
        tokenizer, plain = load_tokenizer(path), load_tokenizer(whole)
        assert tokenizer is not None
        assert plain is not None
        assert tokenizer.same_vocabulary(plain) is None
    assert identity_of("m", parts[1])["weights"] == identity_of("m", parts[0])["weights"]
    assert folder_fingerprint(parts[1]) == folder_fingerprint(parts[0])
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(parts[1], cache_tokens=128, profile="off") as llm, LLM(whole, cache_tokens=128, profile="off") as one:
        assert llm.generate(["the cat"], params)[0].token_ids == one.generate(["the cat"], params)[0].token_ids


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value)


def test_a_part_is_missing(parts: list[Path]) -> None:
    parts[1].unlink()
    for path in (parts[0], parts[-1]):
        assert refusal(path) == f"{parts[1]} is missing: {path} is one of {len(parts)} parts; put all into one folder"


def test_a_part_was_renamed(parts: list[Path], tmp_path: Path) -> None:
    parts[0].rename(tmp_path / "other.gguf")
    assert "its name does not end in -00001-of-" in refusal(tmp_path / "other.gguf")


def test_parts_that_changed_places(parts: list[Path], tmp_path: Path) -> None:
    parts[1].rename(tmp_path / "held")
    parts[2].rename(parts[1])
    (tmp_path / "held").rename(parts[2])
    assert f"{parts[1]} says that it is part 2 (from 0) of {len(parts)}" in refusal(parts[0])


def other_part(path: Path, index: int, count: int, names: list[str]) -> None:
    path.unlink()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", index)
    writer.add_uint16("split.count", count)
    for name in names:
        writer.add_tensor(name, torch.zeros(4).numpy())
    finish(writer)


def test_a_part_of_another_model(parts: list[Path]) -> None:
    other_part(parts[1], 1, len(parts), ["token_embd.weight"])
    assert f"tensor 'token_embd.weight' is in {parts[0]} and in {parts[1]}" in refusal(parts[0])
    other_part(parts[1], 1, len(parts), ["t"])
    assert "split.tensors.count=" in refusal(parts[0])
    other_part(parts[1], 1, len(parts) + 1, ["t"])
    assert f"{parts[1]} says that it is part 1 (from 0) of {len(parts) + 1}" in refusal(parts[0])
