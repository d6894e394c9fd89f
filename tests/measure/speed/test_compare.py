"""Ratios, the summary of drafters by slice, and the table of the documentation."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from foretoken.measure.speed.plan import SpeedSample, SpeedSetting
from foretoken.measure.speed.report import against_peer, by_position, ratios, speed_report, summary
from foretoken.measure.speed.rows import SpeedRow, summarise
from tests.measure.fakes import PROMPTS, answer

PLAIN = SpeedSetting("plain")
NGRAM = [SpeedSetting(f"ngram-{n}", drafter="ngram", num_draft=n, free=True) for n in (3, 8)]
MODEL = SpeedSetting("draft_model(draft_top_k=5)-3", drafter="draft_model", num_draft=3, options="draft_top_k=5")
PEER, PEER_DRAFT = SpeedSetting("o", "o"), SpeedSetting("o-draft-5", "o", "draft", 5, counterpart="draft_model")
LLAMA = [
    SpeedSetting(f"llama.cpp-{kind}", "llama.cpp", kind, "auto", counterpart="ngram", free=True)
    for kind in ("ngram-mod", "lookup")
]


def rows(**seconds: float) -> tuple[SpeedRow, ...]:
    """Rows of settings by name: 10 tokens in so many seconds on the first prompt (code)."""
    known = {setting.name: setting for setting in (PLAIN, *NGRAM, MODEL, PEER, PEER_DRAFT, *LLAMA)}
    samples = [SpeedSample(known[name], 0, "code", 0.0, 0, answer(10, value)) for name, value in seconds.items()]
    return summarise(samples, PROMPTS[:1])


def test_ratios_compare_each_engine_at_its_best():
    times = {
        "plain": 1.0,
        "ngram-3": 0.8,
        "ngram-8": 0.5,
        MODEL.name: 0.4,
        "o": 2.0,
        "o-draft-5": 0.8,
        "llama.cpp-ngram-mod": 1.0,
    }
    assert ratios(rows(**times, **{"llama.cpp-lookup": 0.25}))["code"] == {
        "speculative / foretoken plain": 2.5,
        "plain / o plain": 2.0,
        "speculative / o plain": 5.0,
        "speculative / o draft": 2.0,
        "speculative / llama.cpp ngram-mod": 2.5,
        "speculative / llama.cpp lookup": 0.625,
        "best free / foretoken plain": 2.0,
        "best free / llama.cpp best n-gram": 0.5,
        "ngram / llama.cpp best ngram": 0.5,
        "draft_model / o best draft_model": 2.0,
    }


def test_the_same_drafter_elsewhere_is_the_fastest_that_drafts_alike():
    found = {
        row.setting: row
        for row in rows(
            **{
                "plain": 1.0,
                "ngram-3": 0.5,
                MODEL.name: 1.0,
                "o": 2.0,
                "llama.cpp-ngram-mod": 1.0,
                "llama.cpp-lookup": 0.25,
            }
        )
    }
    everything = list(found.values())
    assert against_peer(found["ngram-3"], everything) == (0.5, "llama.cpp-lookup")
    assert against_peer(found["plain"], everything) == (2.0, "o")
    assert against_peer(found[MODEL.name], everything) is None
    assert against_peer(found["o"], everything) is None


def two_slices() -> tuple[SpeedRow, ...]:
    def own(seconds: float) -> object:
        return answer(10, seconds, num_steps=5, decode_steps=4, draft_s=0.02, verify_s=0.1, positions=((8, 6), (6, 3)))

    samples = [
        SpeedSample(setting, place, PROMPTS[place].slice, 0.0, 0, own(seconds))
        for setting, times in (
            (PLAIN, (1.0, 1.0)),
            (NGRAM[0], (0.8, 0.5)),
            (NGRAM[1], (1.25, 0.25)),
            (MODEL, (0.5, 2.0)),
            (LLAMA[0], (0.4, 0.5)),
        )
        for place, seconds in zip((0, 2), times, strict=True)
    ]
    return summarise(samples, PROMPTS)


def test_the_summary_has_each_drafter_at_its_best_on_each_slice():
    table = summary(two_slices(), 0.0)
    assert table[0] == ["drafter", "code", "edit", "all"]
    lines = {line[0]: line[1:] for line in table[1:]}
    assert list(lines) == ["ngram", "draft_model(draft_top_k=5)", "llama.cpp ngram-mod"]
    assert lines["ngram"][:2] == ["1.25x 2.00 (3)", "4.00x 2.00 (8)"]
    assert lines["draft_model(draft_top_k=5)"][:2] == ["2.00x 2.00 (3)", "0.50x 2.00 (3)"]
    assert summary(two_slices(), 0.8) == []
    assert summary([row for row in two_slices() if row.slice == "code"], 0.0) == []


def test_the_drafter_table_ranks_by_speed_within_a_slice(script):
    lines = script.drafter_table(two_slices())
    code = lines[lines.index("### code") : lines.index("### edit")]
    assert [line.split("|")[1].strip() for line in code if line.startswith("| `")] == [
        "`draft_model(draft_top_k=5)`",
        "`ngram`",
    ]
    assert code[5] == "| `ngram` | 3 | 1.25x | 2.00 | 75 50 | 5.0 | 0.50x llama.cpp-ngram-mod |"
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_many_positions_are_cut():
    row = next(row for row in two_slices() if row.acceptance_per_position)
    assert by_position(row) == "75 50"
    assert by_position(row, most=1) == "75 ..."


@pytest.fixture
def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "scripts" / "drafter_table.py"
    spec = importlib.util.spec_from_file_location("drafter_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_fills_the_marked_part_of_a_page(script, tmp_path, monkeypatch):
    found = two_slices()
    report = speed_report(found, {}, "foretoken bench --x", ["busy"], machine={"cpu": "test"})
    raw = tmp_path / "r.json"
    raw.write_text(report.json_line(), encoding="utf-8")
    assert script.rows_of(json.loads(report.json_line())) == list(found)
    page = tmp_path / "page.md"
    page.write_text(f"above\n{script.BEGIN}\nold\n{script.END}\nbelow\n", encoding="utf-8")
    for _ in range(2):  # again, it replaces what it wrote
        monkeypatch.setattr(sys, "argv", ["drafter_table.py", str(raw), "--into", str(page)])
        script.main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    assert text.count("### code") == 1
    assert "    foretoken bench --x" in text
    assert "- busy" in text


def test_the_script_reads_results_from_before_a_field_existed(script):
    raw = json.loads(speed_report(two_slices(), {}, "c", []).json_line())
    for row in raw["rows"]:
        del row["options"], row["counterpart"], row["free"]
    assert script.rows_of(raw)[1].options == ""


def test_the_script_says_when_a_page_has_no_place_for_the_table(script, tmp_path, monkeypatch):
    raw, page = tmp_path / "r.json", tmp_path / "page.md"
    raw.write_text(speed_report(two_slices(), {}, "c", []).json_line(), encoding="utf-8")
    page.write_text("nothing here", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["drafter_table.py", str(raw), "--into", str(page)])
    with pytest.raises(SystemExit, match="table: begin"):
        script.main()


def test_an_adaptive_setting_is_compared_with_the_best_fixed_one_of_the_run() -> None:
    settings = {s.name: s for s in (PLAIN, *NGRAM, SpeedSetting("ngram-auto", drafter="ngram", num_draft="auto"))}
    lossy = SpeedSetting("typical-5", drafter="draft_model", num_draft=5, lossy=True)
    seconds = {"plain": 1.0, "ngram-3": 0.8, "ngram-8": 0.5, "ngram-auto": 0.4}
    samples = [SpeedSample(settings[name], 0, "code", 0.0, 0, answer(10, value)) for name, value in seconds.items()]
    samples.append(SpeedSample(lossy, 0, "code", 0.0, 0, answer(10, 0.1)))
    assert ratios(summarise(samples, PROMPTS[:1]))["code"]["ngram-auto / best fixed (ngram-8)"] == 1.25
