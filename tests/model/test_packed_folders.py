"""Folders of packed matrices as older packages left them: settings and shards under names of their own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.loader import open_weights, read_config
from foretoken.model.open import native_config
from foretoken.model.packed.weights import PackedWeights
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.packed_files import FORMS, write_packed

SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 104}
_BASE = "gptq_model-4bit-32g.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("packed") / "plain", "llama", **SHAPE)


def put_beside(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Move the settings out of config.json into a file of their own."""
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / name).write_text(json.dumps(settings))


def split(folder: Path) -> Path:
    """Divide the weights into two shards with an index, as AutoGPTQ named them; returns the index."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shard_of = {name: f"{Path(_BASE).stem}-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(state)}
    for shard in set(shard_of.values()):
        save_file({name: tensor for name, tensor in state.items() if shard_of[name] == shard}, folder / shard)
    index = folder / f"{_BASE}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return index


def check_equal(folder: Path, same: Path) -> None:
    assert native_config(folder) == native_config(same)
    weights, expected = open_weights(folder), open_weights(same)
    assert isinstance(weights, PackedWeights)
    weights.check(read_config(folder))
    assert sorted(weights.own_names) == sorted(expected.own_names)
    for name in expected.own_names:
        shape = expected.shape(name)
        assert torch.equal(weights.read(name, shape), expected.read(name, shape))


_AUTOAWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4}


@pytest.mark.parametrize("name", ["quant_config.json", "quantize_config.json"])
@pytest.mark.parametrize("version", [{}, {"version": "GEMM"}], ids=["oldest", "version"])
def test_settings_where_autoawq_kept_them_are_read(
    source: Path, tmp_path: Path, name: str, version: dict[str, str]
) -> None:
    folder, older = (write_packed(tmp_path / name, source, FORMS["awq"]) for name in ("packed", "older"))
    put_beside(older, name, _AUTOAWQ | version)
    check_equal(older, folder)


def test_autoawq_s_settings_are_refused_by_their_file(source: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS["awq"])
    put_beside(folder, "quant_config.json", _AUTOAWQ | {"version": "GEMV"})
    with pytest.raises(UnsupportedModelError, match=r"quant_config\.json: .*version='GEMV' of AWQ"):
        read_config(folder)
    (folder / "quant_config.json").write_text(json.dumps({"zero_point": True, "q_group_size": 32}))
    with pytest.raises(CheckpointError, match=r"quant_config\.json: .*no 'w_bit'"):
        read_config(folder)


def test_the_settings_of_config_json_come_first(source: Path, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "packed", source, FORMS["awq"])
    (folder / "quant_config.json").write_text("{}")
    assert isinstance(open_weights(folder), PackedWeights)


def test_autogptq_s_shards_are_read(source: Path, tmp_path: Path) -> None:
    folder, older = (write_packed(tmp_path / name, source, FORMS["gptq"]) for name in ("packed", "older"))
    index = split(older)
    check_equal(older, folder)
    shard = older / f"{Path(_BASE).stem}-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"shard {re.escape(shard.name)} is missing .* {re.escape(index.name)} "):
        open_weights(older)
    (tmp_path / "elsewhere").rename(shard)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*00001.* and 1 more without an index"):
        open_weights(older)
