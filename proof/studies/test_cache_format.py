"""The study of cache formats runs and writes what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from studies import cache_format


def test_every_shape_and_format_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    arguments = ["--shapes", "1x20,3x40", "--layers", "2", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cache_format", *arguments])
    assert cache_format.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["shape"], row["format"]) for row in rows] == [
        (shape, f"torch.{dtype}") for shape in ("1x20", "3x40") for dtype in ("float32", "float16")
    ]
    assert all(len(row["seconds"]) == 2 for row in rows)
