"""`foretoken demo --all`: a row for every drafter that can run here, and by name why the others cannot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from foretoken.cli.demo_all import DrafterRow, every_drafter, show_drafters
from foretoken.config import DRAFTERS, PLAIN
from foretoken.printing.console import Console
from tests.cli.conftest import Run


def test_every_drafter_is_in_the_table_or_left_out_with_a_reason(foretoken: Run) -> None:
    done = foretoken("demo", "--all", "--to", "none", "--repeats", 1, "--max-tokens", 6, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    shown = [row["drafter"] for row in found["rows"]]
    assert shown[0] == PLAIN
    assert sorted([*shown[1:], *found["left_out"]]) == sorted(DRAFTERS)
    assert "beforehand" in found["left_out"]["predicted"]
    for row in found["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["emitted_per_step"] >= 1.0
    assert found["rows"][0]["emitted_per_step"] == 1.0


def test_heads_of_the_shipped_target_do_not_run_on_a_widened_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.cli.demo_all.head_folder", lambda name: Path(name))
    specs, left_out = every_drafter(Path("draft"), 4, is_widened=True)
    assert "--to none" in left_out["eagle"]
    assert "eagle" not in specs
    specs, left_out = every_drafter(Path("draft"), 4, is_widened=False)
    assert specs["block"].head == "reference:block"
    assert set(left_out) == {"predicted"}


@pytest.mark.parametrize("width", [40, 120])
def test_the_table_reads_at_every_width(width: int) -> None:
    stream = io.StringIO()
    rows = [DrafterRow(PLAIN, 100.0, 1.0, True), DrafterRow("ngram", 90.25, 1.5, True)]
    rows.append(DrafterRow("draft_model", 1234.5, 3.25, False))
    show_drafters(rows, {"predicted": "it needs the answer beforehand"}, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines[:5])
    assert [line.split() for line in lines[2:5]] == [
        ["none", "100.0", "1.00", "yes"],
        ["draft_model", "1234.5", "3.25", "no"],
        ["ngram", "90.2", "1.50", "yes"],
    ]
    assert "left out: predicted, it needs" in " ".join(lines)


def test_a_single_drafter_beside_all_is_refused(foretoken: Run) -> None:
    done = foretoken("demo", "--all", "--drafter", "ngram")
    assert done.code == 2
    assert "leave --drafter out" in done.err
