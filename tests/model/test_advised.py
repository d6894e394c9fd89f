"""The sampling that a model's makers advise: where it stands, and what a request makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from foretoken.errors import CheckpointError
from foretoken.model.advised import advised_sampling


def test_packaged_models_have_theirs_in_the_table() -> None:
    assert advised_sampling("smollm2") == {"temperature": 0.2, "top_p": 0.9}


def test_a_folder_has_it_in_its_generation_config(tmp_path: Path) -> None:
    assert advised_sampling(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.6, "top_k": -1, "top_p": None, "do_sample": False, "eos_token_id": 2}))
    assert advised_sampling(tmp_path) == {"temperature": 0.6, "top_k": 0}


def test_a_gguf_file_has_it_in_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", -1)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert advised_sampling(path) == {"temperature": 0.5, "top_k": 0, "repetition_penalty": 1.25}


@pytest.mark.parametrize(("key", "value"), [("temperature", -1.0), ("top_p", 2), ("top_k", "all"), ("min_p", True)])
def test_values_that_cannot_be_honoured_are_named(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {key}=.*; mend the file"):
        advised_sampling(tmp_path)
