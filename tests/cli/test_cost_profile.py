"""`foretoken generate --cost-profile`: what it takes, what it says, and that answers stay what they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.engine.startup import known_costs
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(known_costs, "_TINY_STEP_BYTES", 0)


def test_measured_once_said_and_kept(
    foretoken: Run, text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = [
        "generate",
        "--target",
        text_pair.target,
        "--draft",
        text_pair.draft,
        "-p",
        "def f",
        "--max-tokens",
        12,
        "--json",
    ]
    off = foretoken(*common, "--cost-profile", "off", "--show")
    assert off.code == 0
    assert "costs of steps" not in off.err
    monkeypatch.setattr(known_costs, "_LONG_S", 0.0)
    first = foretoken(*common, "--show")
    (file,) = (tmp_path / "cache" / "profiles").iterdir()
    assert "measuring what steps of" in first.err
    assert f"kept in {file}" in first.err
    second = foretoken(*common, "--show")
    assert "measuring" not in second.err
    assert "kept in" not in second.err
    again = foretoken(*common, "--cost-profile", "measure")
    assert "measuring" in again.err
    named = foretoken(*common, "--cost-profile", file)
    assert named.code == 0
    texts = [json.loads(done.lines[-1])["text"] for done in (off, first, second, again, named)]
    assert len(set(texts)) == 1


def test_wrong_values_are_named(foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path) -> None:
    common = ["generate", "--target", text_pair.target, "-p", "def f", "--cost-profile"]
    wrong = foretoken(*common, "sometimes")
    assert (wrong.code, "auto, off, measure" in wrong.err) == (2, True)
    (tmp_path / "x.json").write_text("{}")
    foreign = foretoken(*common, tmp_path / "x.json")
    assert (foreign.code, "not a profile" in foreign.err) == (2, True)
