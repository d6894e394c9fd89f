"""The roofline of a small model: a record and an image, floors below what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.roofline import __main__ as command


def test_it_measures_and_draws(pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_READ_WORDS", 1 << 20)
    monkeypatch.setattr(command, "_PEAK_ROUNDS", 1 << 10)
    out, plot = tmp_path / "roofline.json", tmp_path / "roofline.svg"
    words = ["roofline", "--target", f"{pair.target}@int4", "--rows", "1,3", "--context", "8"]
    monkeypatch.setattr("sys.argv", [*words, "--repeats", "2", "--out", str(out), "--plot", str(plot)])
    assert command.main() == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["rows"] for row in found["rows"]] == [1, 3]
    assert all(len(row["times_ms"][part]) == 2 for row in found["rows"] for part in ("pass", "products"))
    assert found["rows"][1]["arithmetic_ms"] == pytest.approx(3 * found["rows"][0]["arithmetic_ms"])
    assert found["products_a_row"] > 0
    assert plot.read_text(encoding="utf-8").count("<svg") == 1
