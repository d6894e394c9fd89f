"""Checkpoints whose files are missing, cut short or corrupt: refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.errors import CheckpointError
from foretoken.model.loader import load_decoder, read_config
from foretoken.model.names import model_folder
from tests.helpers.checkpoints import tiny_checkpoint
from tests.model.test_loader import edit_config, edit_tensors, llama, made

__all__ = ["llama", "made"]  # fixtures


def test_a_missing_folder_and_a_file_are_told_apart(tmp_path: Path, llama: Path) -> None:
    assert model_folder(str(llama)) == llama
    for name in (str(tmp_path / "nowhere"), "./nowhere", "../no/where", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="does not exist"):
            model_folder(name)
    with pytest.raises(CheckpointError, match="is a file"):
        model_folder(llama / "config.json")


def test_a_hub_id_is_fetched_without_pickles_and_its_failure_is_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        assert "consolidated*" in ignore_patterns  # the same weights a second time
        if name == "some/model":
            return str(tmp_path)
        raise huggingface_hub.errors.LocalEntryNotFoundError("no such snapshot\nlong advice")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_folder("some/model") == tmp_path
    assert asked[0][0] == "some/model"
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in asked[0][1])
    with pytest.raises(
        CheckpointError,
        match=r"'other/model' is neither a local folder nor .* \(no such snapshot\); give the folder of ",
    ):
        model_folder("other/model")
    with pytest.raises(CheckpointError, match=r"\(no such snapshot\); did you mean 'smollm2'\?$"):
        model_folder("smolm2")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_not_json_is_named(llama: Path, name: str) -> None:
    (llama / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        read_config(llama)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 500, -100])
def test_a_truncated_file_is_named(llama: Path, keep: int) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        load_decoder(llama)


def test_a_corrupt_header_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_decoder(llama)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", shard_size="30KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"shard {shard.name} is missing"):
        load_decoder(folder)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_decoder(llama)


def test_a_wrong_shape_is_named_with_both_shapes(llama: Path) -> None:
    edit_config(llama, intermediate_size=80)
    with pytest.raises(
        CheckpointError, match=r"gate_proj\.weight in .* has shape \[64, 48\]; config.json asks for \[80, 48\]"
    ):
        load_decoder(llama)


def test_integer_weights_are_refused(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is stored as I8"):
        load_decoder(llama)


def test_unexpected_tensors_are_refused_and_harmless_ones_ignored(llama: Path) -> None:
    edit_tensors(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    load_decoder(llama)
    edit_tensors(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}))
    with pytest.raises(CheckpointError, match=r"q_proj\.bias .* has no place"):
        load_decoder(llama)
