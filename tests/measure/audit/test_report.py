"""Reports: the verdict (first on a page, last on a terminal), every number with what it had to be, whole files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken import SpecConfig, StorageError
from foretoken.measure.audit.options import AuditOptions
from foretoken.measure.audit.run import audit_report
from foretoken.measure.checks import Check, failed, verdict
from foretoken.measure.report import markdown, print_report
from foretoken.measure.write import write_report
from foretoken.printing.console import Console

GOOD = Check(
    "the distribution", "temperature 0.8", "pass", 640, "z = 0.51, p = 0.6", "p >= 2e-05", "a temperature off by 14%"
)
BAD = Check(
    "equal | seeds", "num_draft 1", "fail", 96, "1 of 4 equal", "all equal", detail="first differences at token 3"
)
OPTIONS = AuditOptions("x", SpecConfig())
REPORT = audit_report(
    OPTIONS,
    (GOOD, BAD),
    "foretoken audit -t x",
    machine={"cpu": "abacus", "cores": 2},
    versions={"torch": "2"},
    date="2026-11-21",
)


def test_the_verdict_counts() -> None:
    assert REPORT.verdict == "FAIL: 1 of 2 checks failed"
    assert failed((GOOD, BAD)) == (BAD,)
    others = (replace(GOOD, result="undecided"), replace(GOOD, result="not claimed"), replace(GOOD, result="info"))
    assert verdict((GOOD, *others)) == ("PASS: 1 checks; 1 undecided; lossy rule: distribution not claimed", True)


def test_markdown() -> None:
    page = markdown(REPORT)
    lines = page.splitlines()
    assert lines[0] == "# FAIL: 1 of 2 checks failed"
    assert "    foretoken audit -t x" in lines
    assert (
        "| pass | the distribution | temperature 0.8 | 640 | z = 0.51, p = 0.6 | p >= 2e-05 | a temperature off by 14% |"  # noqa: E501
        in lines
    )
    assert r"| fail | equal \| seeds | num_draft 1 | 96 | 1 of 4 equal | all equal |  |" in lines
    assert "equal | seeds (num_draft 1): first differences at token 3" in lines
    for told in ("abacus", "torch 2", "2026-11-21", "with probability 0.0001 at most"):
        assert told in page


def test_a_terminal_shows_all_of_it() -> None:
    out = io.StringIO()
    print_report(REPORT, Console(file=out, width=200))
    shown = out.getvalue()
    for told in ("FAIL: 1 of 2", "z = 0.51", "first differences at token 3", "a temperature off by 14%"):
        assert told in shown


def test_files(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    write_report(REPORT, tmp_path / "new" / "r.json", "r")
    write_report(REPORT, tmp_path / "new" / "r.md", "r")
    found = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (found["verdict"], found["passed"]) == (REPORT.verdict, False)
    assert found["checks"][1]["detail"] == "first differences at token 3"
    assert {"command", "date", "machine", "versions", "options", "false_alarm_rate"} <= set(found)
    assert (tmp_path / "new" / "r.md").read_text() == markdown(REPORT)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["r.json", "r.md"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.md").write_text("old")

    def cut(self: Path, data: bytes) -> None:
        with self.open("wb") as file:
            file.write(data[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", cut)
    with pytest.raises(KeyboardInterrupt):
        write_report(REPORT, tmp_path / "r.md", "r")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("r.md", b"old")]


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        AuditOptions("x", SpecConfig(), out=tmp_path / "file" / "r.md")
