"""The study of memory reads all that it says it reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies.read_bandwidth import __main__ as command


def test_every_word_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "bandwidth.json"
    words = ["read_bandwidth", "--mebibytes", "8", "--threads", "1,2", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    assert command.main() == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["pages"], row["threads"], len(row["seconds"])) for row in rows] == [
        ("ordinary", 1, 2), ("ordinary", 2, 2), ("large", 1, 2), ("large", 2, 2),
    ]  # fmt: skip
