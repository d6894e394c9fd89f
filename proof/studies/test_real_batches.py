"""Turns of `studies.real_batches`, what they are summarised to, and a run that was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import InputError
from studies.real_batches import again, stage
from studies.real_batches.__main__ import _parser, measure
from studies.real_batches.plan import parts, turns
from studies.real_batches.tables import ALL, rows, tables


@pytest.mark.parametrize(("count", "num_requests"), [(30, 1), (30, 4), (30, 16), (2, 4), (1, 1), (7, 2)])
def test_parts_hold_every_prompt_once(count: int, num_requests: int) -> None:
    found = parts(count, num_requests)
    assert sorted(place for part in found for place in part) == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_order_of_settings_is_reversed_at_every_second_turn() -> None:
    plan = list(turns(("plain", "auto", "ngram"), {"code": 12, "chat": 12}, (1, 4), (0.0,), (False, True), 2))
    assert len({turn.key for turn in plan}) == len(plan)
    groups = [plan[start : start + 3] for start in range(0, len(plan), 3)]
    assert all(len({(turn.cell, turn.part, turn.repeat) for turn in group}) == 1 for group in groups)
    assert [turn.setting for turn in groups[0]] == ["plain", "auto", "ngram"]
    assert [turn.setting for turn in groups[1]] == ["ngram", "auto", "plain"]
    firsts = Counter(group[0].setting for group in groups)
    assert abs(firsts["plain"] - firsts["ngram"]) <= 1


def line(setting: str, kind: str, seconds: list[float], answers: list[str], part: int = 0) -> dict[str, Any]:
    prompts = [
        {"place": 10 * part + place, "num_tokens": 100, "seconds": one, "answer": answer}
        | {"num_steps": 50, "num_drafted": 80, "num_accepted": 40}
        for place, (one, answer) in enumerate(zip(seconds, answers, strict=True))
    ]
    cell = {"setting": setting, "kind": kind, "num_requests": 4, "temperature": 0.0, "neighbour": False}
    return cell | {"part": part, "repeat": 0, "others_cores": 0.05, "prompts": prompts}


def test_ratios_are_of_the_same_prompts_and_of_all_kinds_together() -> None:
    lines = [
        line("plain", "code", [2.0, 2.0], ["a", "b"]),
        line("auto", "code", [1.0, 1.0], ["a", "x"]),
        line("ngram", "code", [1.25, 1.25], ["a", "b"]),
        line("plain", "chat", [1.0, 1.0], ["c", "d"]),
        line("auto", "chat", [1.0, 1.0], ["c", "d"]),
        line("plain", "code", [4.0], ["e"], part=1),  # its `auto` turn was not reached
        line("plain", "mixed", [9.0], ["f"]),
    ]
    found = {(row.kind, row.setting): row for row in rows(lines, ["code", "chat", "mixed"])}
    auto = found["code", "auto"]
    assert auto.over_plain == pytest.approx(2.0)
    assert auto.over_best_lookup == pytest.approx(1.25)
    assert auto.best_lookup == "ngram"
    assert auto.num_differing == 1
    assert auto.emitted_per_step == pytest.approx(2.0)
    assert found["chat", "auto"].over_plain == pytest.approx(1.0)
    assert found[ALL, "auto"].over_plain == pytest.approx(6.0 / 4.0)
    assert found[ALL, "plain"].num_prompts == 5
    shown = tables(list(found.values()))
    assert [one.title for one in shown] == ["4 at once, temperature 0"]
    assert "2.00" in shown[0].lines[0]  # two prompts have no interval


def test_seconds_of_a_turn_are_divided_by_attributed_time() -> None:
    assert stage.shared([1.0, 3.0], 8.0) == [2.0, 6.0]
    assert stage.shared([0.0, 0.0], 8.0) == [4.0, 4.0]


def test_the_looping_process_ends_with_the_process_that_started_it() -> None:
    loop = f"[sys.executable, '-c', {stage._LOOP!r}, str(os.getpid())]"
    starts = f"import os, subprocess, sys\nprint(subprocess.Popen({loop}, stdout=subprocess.DEVNULL).pid)"
    with stage.looping_process(False):
        pass
    out = subprocess.run([sys.executable, "-c", starts], capture_output=True, text=True, check=True).stdout
    pid = int(out)
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        os.sched_yield()
        subprocess.run(["sleep", "0.01"], check=True)
    pytest.fail("it still runs")


@pytest.mark.parametrize(
    ("given", "field"), [(["--neighbour", "some"], "neighbour"), (["--requests", "0"], "requests")]
)
def test_an_option_that_cannot_be_honoured_is_named(given: list[str], field: str, tmp_path: Path) -> None:
    options = _parser().parse_args(["--prompts", str(tmp_path), *given])
    with pytest.raises(InputError, match=field):
        measure(options)


def test_a_run_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tmp_path / "prompts.jsonl"
    asked = [("code", "def add(a, b):"), ("chat", "Say hello."), ("chat", "Say it again.")]
    texts.write_text("".join(json.dumps({"prompt": text, "slice": kind}) + "\n" for kind, text in asked))
    given = ["--prompts", str(texts), "--kinds", "code,chat,mixed", "--requests", "2", "--max-tokens", "4"]
    given += ["--settings", "plain,auto", "--keep", str(tmp_path / "keep.jsonl"), "--max-prompt-tokens", "64"]
    given += ["--temperatures", "0,0.7"]
    monkeypatch.setattr("studies.real_batches.__main__.with_template", lambda prompts, llm, chat: tuple(prompts))
    stopped = measure(_parser().parse_args([*given, "--time-budget", "0"]))
    assert not stopped.results["turns"]
    assert "time budget" in stopped.caveats[-1]
    whole = measure(_parser().parse_args(given))
    rounds = Counter(turn["setting"] for turn in whole.results["turns"])
    assert rounds == {"plain": 6, "auto": 6}
    assert all(row["num_differing"] == 0 for row in whole.results["rows"])
    assert all(sum(one["seconds"] for one in turn["prompts"]) > 0 for turn in whole.results["turns"])
    kept = (tmp_path / "keep.jsonl").read_text()
    again = measure(_parser().parse_args(given))
    assert again.results["turns"] == whole.results["turns"]
    assert (tmp_path / "keep.jsonl").read_text() == kept
    with pytest.raises(InputError, match="seed"):
        measure(_parser().parse_args([*given, "--seed", "1"]))


@pytest.mark.parametrize("name", ["2026-11-28-smollm2-1b-ngram-table-avx512", "2026-11-25-smollm2-beside-loop"])
def test_the_rows_of_a_record_are_those_of_its_turns(name: str) -> None:
    record = json.loads((Path(__file__).parents[2] / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    for found, kept in zip(again.rows_of(record), record["rows"], strict=True):
        assert (found.kind, found.setting) == (kept["kind"], kept["setting"])
        for field in ("over_plain", "over_plain_low", "over_plain_high"):
            value = getattr(found, field)
            assert value == (None if value is None else pytest.approx(kept[field], rel=1e-6))
