"""`studies.step_cost`: several models in one run, each in the format that its name asks for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.errors import InputError
from foretoken.model.attention.batched import BatchedAttention
from foretoken.model.attention.choice import ATTENTION_VARIABLE
from foretoken.model.attention.paged import PagedAttention
from studies.step_cost import SETTINGS, main, opened_as


def test_models_take_turns(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, out = [f"{pair.target}@float32", f"{pair.target}@int4", str(pair.target)], tmp_path / "cost.json"
    options = ["--models", ",".join(names), "--rows", "1,3", "--context", "8", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["step_cost", *options])
    assert main() == 0
    found = json.loads(out.read_text())
    assert [one["model"] for one in found["models"]] == names
    numbers, codes, stored = [one["step_bytes"] for one in found["models"]]
    assert codes < numbers == stored
    for one in found["models"]:
        assert [row["rows"] for row in one["rows"]] == [1, 3]
        assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in one["rows"])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_settings_share_weights(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made under its variables, which are as before when all are."""
    monkeypatch.setitem(SETTINGS, "other", {ATTENTION_VARIABLE: "batched"})
    monkeypatch.setenv(ATTENTION_VARIABLE, "segments")
    models = opened_as(f"{pair.target}@float32", ("default", "other"), "cpu", 8)
    assert [name.partition(" ")[2] for name in models] == ["", "other"]
    first, second = models.values()
    assert first.decoder is second.decoder
    assert (first.attention, second.attention) == (PagedAttention, BatchedAttention)
    assert os.environ[ATTENTION_VARIABLE] == "segments"
    with pytest.raises(InputError, match="some of default, batched, triton, graphs"):
        opened_as(str(pair.target), ("graph",), "cpu", 8)


def test_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["step_cost", "--models", "nowhere/at-all"])
    assert main() == 3
    assert "nowhere/at-all" in capsys.readouterr().err
