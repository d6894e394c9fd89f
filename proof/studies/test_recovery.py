"""Recovery: the oracle, the scripted drafter, and a run from end to end; no time is asserted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.settings import Stage, parse_batch_settings
from studies.recovery import recovery
from studies.recovery.__main__ import main
from studies.recovery.recovery import StepTimes, Stretch, expected_tokens, run_recovery
from studies.recovery.scripted import ScriptedDrafter
from studies.rivals.policies import rival_policies

TIMES = StepTimes(1, (0, 4, 8, 24), (1.0, 1.0, 1.0, 5.0))


def test_a_knowing_controller() -> None:
    assert TIMES.at(16) == 3.0
    assert TIMES.at(0) == 1.0
    assert TIMES.at(24) == 5.0
    assert expected_tokens(2, 0.5) == 1.75
    assert expected_tokens(2.5, 0.5) == 1.75 + 0.5 * 0.125
    assert TIMES.best(0.0) == 0
    assert TIMES.best(0.85) == 8
    assert TIMES.is_right(7, 0.85)
    assert TIMES.is_right(9, 0.85)
    assert not TIMES.is_right(3, 0.85)
    assert not TIMES.is_right(14, 0.85)
    assert TIMES.is_right(4, 0.0)  # costs nothing here


def test_steps_until_the_number_is_right() -> None:
    def steps(*numbers: float) -> int | None:
        return Stretch("s", 1, 0, 1, 0.85, numbers).steps_to_recover(TIMES)

    assert steps(*[8.0] * 20) == 0
    assert steps(*[0.0] * 7, *[8.0] * 20) == 7
    assert steps(*[0.0] * 7, 8.0, *[0.0] * 5, *[8.0] * 20) == 13  # a lucky trial is not it
    assert steps(*[0.0] * 7, *[8.0] * 4, 0.0, *[8.0] * 20) == 7  # nor a trial its end
    assert steps(*[0.0] * 20) is None
    best = Stretch("s", 1, 0, 1, 0.85, (8.0,) * 9)
    assert best.share_of_best(TIMES) == pytest.approx(1.0)
    assert replace(best, numbers=(0.0,) * 9).share_of_best(TIMES) == pytest.approx(1 / expected_tokens(8, 0.85))


def test_the_script_says_what_stands(text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """In good stretches every draft token is accepted, in bad ones none; who chooses is told by what it chose."""
    monkeypatch.setattr(recovery, "_CHANCES", (0.0, 1.0))
    monkeypatch.setattr(recovery, "_STRETCH_STEPS", 6)
    with LLM(text_pair.target, dtype="float32", cache_tokens=1024) as llm:
        stage = Stage(llm, None, rival_policies({1: 4}), seed=0)
        script = ScriptedDrafter((0.0, 1.0), 6, 0)
        (setting,) = parse_batch_settings(("ngram-table",), None, stage.policies)[0][1:]
        recovery._run(stage, script, setting, 2, 12)
        assert list(script.chosen.values()) == [[4] * 12] * 2
        # By 2 requests: the prompt's token, six rounds of one token, six of five.
        assert llm.stats.num_emitted == 2 * (1 + 6 + 6 * 5)
        times = recovery.step_times(stage, 2)
        assert times.numbers == recovery._NUMBERS
        assert list(times.seconds) == sorted(times.seconds)


def test_recovery_from_end_to_end(text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_STRETCH_STEPS", 8)
    monkeypatch.setattr(recovery, "_TIMED_TURNS", 1)
    options = LoadOptions(str(text_pair.target), batches=(1, 2), repeats=1, threads=1, dtype="float32")
    report = run_recovery(options, {1: 3})
    assert [(row.setting, row.batch, row.change) for row in report.rows][:4] == [
        *(("auto", 1, "start"), ("auto", 1, "rise"), ("auto", 1, "fall"), ("table", 1, "start"))
    ]
    table = [row for row in report.rows if row.setting == "table"]
    assert {row.num_draft for row in table} == {3.0}
    assert [len(row.steps) for row in table[:3]] == [1, 2, 1]
    assert set(report.results["summary"]["within_goal"]) == {"auto", "table", "ema", "heuristic"}


def test_a_table_is_not_measured_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["recovery", "--table", "measured"])
    assert main() == 2
    assert "table='measured'" in capsys.readouterr().err
