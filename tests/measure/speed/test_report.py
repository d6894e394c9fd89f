"""What a report says, and where it is written."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.errors import StorageError
from foretoken.machine.identity import machine, versions
from foretoken.measure.report import Report, is_widened, markdown, print_report, source_caveats
from foretoken.measure.speed.report import speed_report
from foretoken.measure.speed.rows import SpeedRow
from foretoken.measure.write import write_report
from foretoken.printing.console import Console
from tests.measure.fakes import rows

ROWS = rows(**{"ngram-3": 0.5})


def report(found: tuple[SpeedRow, ...] = ROWS, **values) -> Report:
    base = speed_report(
        found,
        {"target": "t"},
        "foretoken bench",
        ["widened [bold]"],
        machine={"cpu": "test"},
        versions={"torch": "2"},
        date="2026-01-02T03:04:05",
    )
    return replace(base, **values)


def test_json_line_is_one_line_of_plain_values():
    line = report(options={"target": "t", "out": Path("x"), "slices": ("code",)}).json_line()
    assert "\n" not in line
    found = json.loads(line)
    assert found["options"] == {"target": "t", "out": "x", "slices": ["code"]}
    row = next(r for r in found["rows"] if r["setting"] == "ngram-3" and r["slice"] == "code")
    assert row["speedup"] == 2.0
    assert row["acceptance_per_position"] == [0.5]
    assert found["ratios"]["code"]["speculative / foretoken plain"] == 2.0


def test_whole_answers_have_a_ratio_and_a_price_of_their_own():
    """10 tokens after half a second of prompt: 1.5 s plain, 1 s with a drafter that decodes twice as fast."""
    row = next(row for row in ROWS if row.setting == "ngram-3" and row.slice == "code")
    assert (row.speedup, row.e2e_speedup, row.e2e_tokens_per_s) == (2.0, 1.5, 10.0)
    priced = speed_report(ROWS, {}, "foretoken bench", (), price_per_hour=3.6)
    (line,) = [line for line in priced.tables[-1].lines if line[:2] == ("code, 0", "ngram-3")]
    assert line[2:] == ("10", "100", "-33%")
    assert "Price" not in [table.title for table in report().tables]


def test_a_price_at_a_deadline_counts_the_tokens_of_answers_in_time():
    found = rows(slo_ms=80.0, **{"ngram-3": 0.5})  # 100 ms a token plain, 50 ms with drafts
    priced = speed_report(found, {"slo_ms": 80.0}, "foretoken bench", (), price_per_hour=3.6)
    lines = {line[1]: line[2:] for line in priced.tables[-1].lines if line[0] == "code, 0"}
    assert lines == {"plain": ("0", "never in time", ""), "ngram-3": ("10", "100", "")}
    assert "more than 80 ms between two tokens" in priced.tables[-1].notes[0]


def test_an_engine_that_tells_no_times_has_no_ratio_of_whole_answers_and_no_price():
    silent = tuple(replace(row, e2e_tokens_per_s=None, e2e_speedup=None) for row in ROWS)
    assert speed_report(silent, {}, "foretoken bench", (), price_per_hour=3.6).results["prices"] == ()


def test_the_table_shows_every_setting_and_the_caveats():
    out = io.StringIO()
    print_report(report(files=("x.json",)), Console(file=out, width=200))
    text = out.getvalue()
    for wanted in (
        "ngram-3",
        "2.00x",
        "code, temperature 0",
        "note: widened [bold]",
        "written: x.json",
        "0 of 2",
        "by position",
        "Summary, temperature 0",
    ):
        assert wanted in text
    assert "2.00x 2.00 (3)" in text


def test_a_run_that_was_interrupted_before_any_figure_explains_none():
    out = io.StringIO()
    empty = report((), tables=(), results={"rows": (), "interrupted": True})
    print_report(empty, Console(file=out, width=40))
    assert empty.explained
    assert out.getvalue().strip() == "note: widened [bold]"


def test_no_column_is_cut_however_narrow_the_terminal():
    out = io.StringIO()
    long = tuple(
        replace(r, setting=r.setting + "(" + "x" * 40 + ")[bold]", acceptance_per_position=(0.5,) * 9) for r in ROWS
    )
    print_report(report(long), Console(file=out, width=60))
    assert "…" not in out.getvalue()
    assert "x)[bold]" in out.getvalue()  # what looks like markup is text


def test_a_difference_shows_in_table_and_page():
    found = tuple(
        replace(r, num_differing=1, differences=({"prompt": "a", "token": 7},)) if r.setting == "ngram-3" else r
        for r in ROWS
    )
    page = markdown(report(found))
    assert "1 of 2" in page
    assert "ngram-3 at prompt a token 7" in page


def test_unknown_values_are_left_blank():
    found = tuple(replace(r, acceptance_rate=None, draft_ms_per_step=None, identical=None, ttft_s=None) for r in ROWS)
    assert "None" not in markdown(report(found))


def test_page_has_command_machine_caveats_and_one_table_per_slice():
    page = markdown(report(), "raw.json")
    for wanted in (
        "    foretoken bench",
        "cpu test",
        "torch 2",
        "- widened",
        "## code, temperature 0",
        "## all, temperature 0",
        "(raw.json)",
    ):
        assert wanted in page
    tables, _, short = page.partition("## Summary, temperature 0")
    for part in (tables, short):
        lines = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1
    assert "| ngram | 2.00x 2.00 (3) | 2.00x 2.00 (3) | 2.00x 2.00 (3) |" in short
    one_slice = tuple(r for r in ROWS if r.slice == "code")
    assert "Summary" not in markdown(report(one_slice))


def test_results_of_one_day_do_not_overwrite_each_other(tmp_path):
    first = write_report(report(), tmp_path / "new", "run")
    second = write_report(report(), tmp_path / "new", "run")
    assert [Path(file).name for file in first.files] == ["2026-01-02-run.json", "2026-01-02-run.md"]
    assert [Path(file).name for file in second.files] == ["2026-01-02-run-2.json", "2026-01-02-run-2.md"]
    assert json.loads(Path(first.files[0]).read_text(encoding="utf-8"))["caveats"] == ["widened [bold]"]


def test_an_unwritable_place_is_an_error(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot write the result"):
        write_report(report(), tmp_path / "file", "run")


def test_machine_and_versions_are_known():
    assert machine()["cpu"]
    assert machine()["cores"] >= 1
    assert {"python", "torch"} <= set(versions())


def test_processor_without_proc(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert machine()["cpu"]


def test_caveats_for_widened_checkpoints_and_a_busy_machine(tmp_path):
    (tmp_path / "config.json").write_text('{"widened": {"from": "x"}}', encoding="utf-8")
    assert is_widened(tmp_path)
    assert not is_widened(tmp_path / "missing")
    found = source_caveats(tmp_path, tmp_path, load=1e6)
    assert len(found) == 3
    assert "load average" in found[2]
    assert source_caveats(tmp_path / "missing", None, load=0.0) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["NVIDIA H200"], "NVIDIA H200"),
        (["NVIDIA H200", "NVIDIA H200"], "2 x NVIDIA H200"),
        (["NVIDIA A100", "Tesla T4"], "NVIDIA A100, Tesla T4"),
    ],
)
def test_a_machine_has_all_its_gpus(names: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on `cuda:1` was not on the first one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    assert machine()["gpu"] == expected
