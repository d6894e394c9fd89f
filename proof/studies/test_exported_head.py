"""The study of exported heads: what it sums, and how it refuses. The engines' own parts: `tests/measure`."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.exported_head import HeadRow, main, same_text, table_of


def test_counts_are_summed_by_slice() -> None:
    rows = [
        HeadRow("code", "a", 8, 10, 4, 12, 4, True),
        HeadRow("code", "b", 8, 10, 2, 12, 5, False),
        HeadRow("json", "c", 8, 0, 0, 0, 0, True),
    ]
    assert table_of(rows).lines == (
        ("code", "2", "6 of 20", "30.0%", "9 of 24", "37.5%", "1 of 2"),
        ("json", "1", "0 of 0", "none", "0 of 0", "none", "1 of 1"),
        ("all", "3", "6 of 20", "30.0%", "9 of 24", "37.5%", "2 of 3"),
    )


def test_texts_may_end_in_different_places() -> None:
    assert same_text("a = 1\n\n", "a = 1\nb")
    assert same_text("a = 1", "a =")
    assert not same_text("a = 1", "a = 2")


def test_without_programs_the_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["exported_head", "--head", str(tmp_path)])
    monkeypatch.delenv("FORETOKEN_LLAMA_CPP", raising=False)
    assert main() != 0
    assert "FORETOKEN_LLAMA_CPP" in capsys.readouterr().err
