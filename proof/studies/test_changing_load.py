"""A load that changes: phases, the same requests under every setting, ratios; on tiny models, without clocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM
from foretoken.errors import InputError
from foretoken.measure.load.prompts import Ask
from foretoken.measure.load.settings import BatchSetting, Stage
from foretoken.measure.report import print_report
from studies.changing_load import measure
from studies.changing_load.__main__ import main
from studies.changing_load.measure import LoadTurn, load_summary, run_changing_load, summarise_load
from studies.changing_load.options import MIXED, ChangingLoadOptions, LoadPhase, parse_phases

PLAIN, TWO, OWN = BatchSetting("plain"), BatchSetting("ngram-2", None, 2), BatchSetting("ngram-auto", None, "auto")


def options(pair: SimpleNamespace, **values: object) -> ChangingLoadOptions:
    small = {
        "target": str(pair.target),
        "draft": str(pair.draft),
        "threads": 1,
        "dtype": "float32",
        "settings": ("plain", "draft_model-2", "ngram-auto", "draft_model-auto"),
        "max_tokens": 8,
        "prompt_tokens": 24,
        "repeats": 2,
        "phases": (LoadPhase(1, "chat"), LoadPhase(3, "random"), LoadPhase(2, "chat")),
        "phase_s": 0.01,
    }
    return ChangingLoadOptions(**(small | values))


@pytest.fixture
def stage(text_pair: SimpleNamespace) -> Iterator[Stage]:
    with LLM(text_pair.target, dtype="float32", cache_tokens=2048) as llm:
        yield Stage(llm, str(text_pair.draft), {}, seed=0)


@pytest.mark.parametrize(
    "wrong", [{"phases": (LoadPhase(1, "poems"),)}, {"phase_s": 0.0}, {"phases": (LoadPhase(10**6, "code"),)}]
)
def test_options_that_cannot_be_measured_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        ChangingLoadOptions("t", **wrong)


def test_phases_are_written_as_text() -> None:
    assert parse_phases("1:code,16:random") == (LoadPhase(1, "code"), LoadPhase(16, "random"))
    assert parse_phases("mixed") == MIXED
    for wrong in ("", "code", "0:code", "3:"):
        with pytest.raises(InputError, match="load"):
            parse_phases(wrong)


def test_the_study_from_its_command_line(
    text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["changing_load", "--target", str(text_pair.target), *words])
        return main()

    small = ("--phase-s", "0.01", "--repeats", "1", "--max-tokens", "4", "--prompt-tokens", "8")
    assert run("--load", "1:chat,2:chat", "--settings", "ngram-2", *small, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["setting"] for row in found["rows"]] == ["plain", "ngram-2"]
    assert found["command"].startswith("python -m studies.changing_load --target")
    for wrong in ("x", "1000000:code"):
        assert run("--load", wrong) == 2
    assert "BATCH:SLICE" in capsys.readouterr().err


def test_a_trace_answers_the_same_requests_under_every_setting(
    text_pair: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_changing_load(options(text_pair))
    assert [row.setting for row in report.rows] == ["plain", "draft_model-2", "ngram-auto", "draft_model-auto"]
    assert all(len(row.phases) == 3 for row in report.rows)
    assert report.rows[0].speedup == 1.0
    assert report.results["summary"]["single_fixed"] in ("plain", "draft_model-2")
    print_report(report)
    assert "ratio to best single fixed" in capsys.readouterr().out
    json.loads(report.json_line())


def test_a_stopped_load_goes_on_with_the_runs_that_are_missing(
    text_pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.jsonl"
    small = options(text_pair, settings=("plain", "ngram-2"), max_tokens=4, resume=path)
    whole, asked = measure.run_through, 0
    sizes: list[list[int]] = []

    def until_the_sixth(stage: Stage, setting: object, phases: object, jobs: list[list[object]]) -> LoadTurn:
        nonlocal asked
        asked += 1
        if asked == 6:  # two warm-ups of plain, one of each setting, one measured run
            raise KeyboardInterrupt
        sizes.append([len(own) for own in jobs])
        return whole(stage, setting, phases, jobs)

    monkeypatch.setattr(measure, "run_through", until_the_sixth)
    assert run_changing_load(small).interrupted
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 1 + 1
    measured, first = sizes[-1], asked
    sizes.clear()
    report = run_changing_load(small)
    assert asked - first == 1 + 2 + 2 * small.repeats - 1
    assert sizes[3:] == [measured] * (2 * small.repeats - 1)  # as many requests as before, whatever plain takes now
    assert [(row.setting, row.num_runs) for row in report.rows] == [("plain", 2), ("ngram-2", 2)]
    assert any("stopped and resumed" in caveat for caveat in report.caveats)
    with pytest.raises(InputError, match="max_tokens=4, this run has 5"):
        run_changing_load(replace(small, max_tokens=5))


def test_phases_follow_each_other_without_a_gap(stage: Stage) -> None:
    """Never more requests at a time than the phase has, and every token counts in the phase in which it came."""
    phases = (LoadPhase(2, "a"), LoadPhase(1, "a"))
    jobs = [
        measure._jobs(phase, {"a": [Ask("a", (5, 6))]}, count, 6) for phase, count in zip(phases, (5, 2), strict=True)
    ]
    sizes: list[int] = []
    step = stage.llm.step

    def watched():
        sizes.append(len(stage.llm.engine.states))
        return step()

    stage.llm.step = watched  # type: ignore[method-assign]
    turn = measure.run_through(stage, PLAIN, phases, jobs)
    wanted = [job.max_tokens for own in jobs for job in own]
    assert wanted == [3, 6, 9, 3, 6, 3, 6]
    assert sum(turn.tokens) == sum(wanted)
    assert all(turn.tokens)
    assert max(sizes) == 2
    assert sizes[-1] == 1
    assert not stage.llm.engine.has_work


def test_a_trace_is_held_against_the_best_single_fixed_setting() -> None:
    def turns(*speeds: float) -> dict[int, LoadTurn]:
        return {
            repeat: LoadTurn((5.0, 5.0), (round(speed * 5), round(speed * 5))) for repeat, speed in enumerate(speeds)
        }

    rows = summarise_load({PLAIN: turns(10, 20), TWO: turns(20, 40), OWN: turns(30, 60)})
    assert [row.to_single_fixed for row in rows] == [0.5, 1.0, 1.5]
    assert [row.speedup for row in rows] == [1.0, 2.0, 3.0]
    assert rows[2].phases == (45.0, 45.0)
    assert load_summary(rows)["single_fixed"] == "ngram-2"
    assert summarise_load({OWN: turns(1)}) == ()
