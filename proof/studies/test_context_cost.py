"""The study of contexts runs, beside another checkout too, and refuses what is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from studies import context_cost

ROOT = Path(__file__).resolve().parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["context_cost", "--models", "reference:draft@int8", *options])
    return context_cost.main()


def test_every_context_is_measured_beside_the_layers_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    sizes = ("--contexts", "5,40", "--rows", "1,3", "--repeats", "2")
    assert run(monkeypatch, *sizes, "--before", str(ROOT), "--out", str(out)) == 0
    (model,) = json.loads(out.read_text())["models"]
    cells = {(cell["layers"], cell["context"], cell["rows"]): cell for cell in model["cells"]}
    assert set(cells) == {(name, c, r) for name in ("before", "now") for c in (5, 40) for r in (1, 3)}
    assert all(len(cell["milliseconds"]) == 2 for cell in cells.values())
    assert cells["now", 5, 1]["over_shortest"]["median"] == 1
    assert all(("over_before" in cell) == (layers == "now") for (layers, _, _), cell in cells.items())
    assert cells["now", 40, 1]["cache_bytes"] == 8 * cells["now", 5, 1]["cache_bytes"]


def test_a_folder_that_is_no_checkout_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--before", str(tmp_path)) == 2
    assert "before" in capsys.readouterr().err
