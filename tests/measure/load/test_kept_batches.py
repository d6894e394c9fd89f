"""A load measurement that is interrupted, resumed or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.control.routing import RoutingRules
from foretoken.errors import ConfigError, InputError
from foretoken.machine.neighbours import contention_notes
from foretoken.measure.load import run as batches_module
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.rows import BatchSample, grid_tables, summarise_grid
from foretoken.measure.load.run import opened, run_batches
from foretoken.measure.load.settings import BatchSetting, Turn, parse_batch_settings, together
from tests.measure.load.test_batches import options, stage, turn

__all__ = ["stage"]  # fixtures


def test_an_interrupted_run_keeps_what_there_is(
    text_pair: SimpleNamespace, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = batches_module.answer_all

    def stop_at_six(*arguments, **named):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return whole(*arguments, **named)

    monkeypatch.setattr(batches_module, "answer_all", stop_at_six)
    report = run_batches(options(text_pair, out=tmp_path, name="stopped"))
    assert report.interrupted
    assert any("interrupted" in caveat for caveat in report.caveats)
    assert [row.setting for row in report.rows] == ["plain", "draft_model-2", "ngram-auto", "draft_model-auto"]
    written = json.loads(next(tmp_path.glob("*-stopped.json")).read_text())
    assert written["interrupted"]
    assert len(written["rows"]) == 4
    assert written["options"]["max_tokens"] == 8
    page = next(tmp_path.glob("*-stopped.md")).read_text()
    assert "| draft_model-2 |" in page
    assert "machine:" in page


def test_the_engine_has_the_limits_that_were_asked_for(text_pair: SimpleNamespace) -> None:
    """By default a whole batch reads in one step, runs at once and fits; the answers are the same under any limits."""
    limits = {
        "max_batch_size": 2,
        "max_prompt_tokens": 5,
        "max_step_tokens": 9,
        "cache_tokens": 320,
        "cache_reserve": 0.2,
    }
    rules = {"min_tokens_to_speculate": 6, "max_speculating_requests": 1}
    found = {}
    for name, values in (("usual", {}), ("asked", {**limits, **rules})):
        with opened(options(text_pair, **values), ("chat",), max_batch=3, count=3, answer_tokens=8) as (stage, asks):
            engine = stage.llm.engine
            config, routing = engine.scheduler.config, engine.chooser.routing
            if name == "usual":
                assert (
                    config.max_batch_size,
                    config.max_prompt_tokens,
                    config.max_step_tokens,
                    config.cache_reserve,
                ) == (3, 4096, None, 0.15)
                assert routing.rules == RoutingRules()
            else:
                assert (
                    config.max_batch_size,
                    config.max_prompt_tokens,
                    config.max_step_tokens,
                    config.cache_reserve,
                ) == (2, 5, 9, 0.2)
                assert stage.llm.target.capacity_tokens == 320
                assert (routing.rules.min_tokens_to_speculate, routing.rules.max_speculating_requests) == (6, 1)
            (setting,) = parse_batch_settings(("ngram-auto",), None)[0][1:]
            found[name] = [answer.token_ids for answer in stage.answer(setting, asks["chat"], 8).answers]
            assert (routing.num_by_reason["load"] > 0) == (name == "asked")
    assert found["usual"] == found["asked"]


@pytest.mark.parametrize("wrong", [{"min_tokens_to_speculate": 3}, {"max_speculating_requests": 2}])
def test_rules_need_a_setting_that_asks_them(text_pair: SimpleNamespace, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*applies to settings with an adaptive number"):
        options(text_pair, settings=("plain", "ngram-2"), **wrong)
    assert options(text_pair, settings=("plain", "ngram-auto"), **wrong).routing != RoutingRules()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch_size": 0},
        {"max_prompt_tokens": 0},
        {"max_step_tokens": 0},
        {"cache_tokens": 0},
        {"cache_reserve": 1.1},
        {"min_tokens_to_speculate": -1},
        {"max_speculating_requests": -1},
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(InputError, match=f"{name}={value}: must be"):
        LoadOptions("t", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": ()},
        {"batches": (0,)},
        {"slices": ()},
        {"slices": ("poems",)},
        {"max_tokens": 1},
        {"threads": 0},
    ],
)
def test_options_that_cannot_be_measured_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        LoadOptions("t", **wrong)


def test_turns_beside_other_processes_are_marked_in_cell_row_and_caveat() -> None:
    settings = {name: BatchSetting(name) for name in ("plain", "ngram-2")}
    samples = [
        BatchSample(settings[name], 1, "code", repeat, replace(turn(1.0), contended=name != "plain" and repeat == 0))
        for name in settings
        for repeat in range(2)
    ]
    rows = summarise_grid(samples)
    assert [(row.num_contended, row.num_turns) for row in rows] == [(0, 2), (1, 2)]
    assert [line[1][-1] for line in grid_tables(rows)[0].lines] == ["0", "!"]
    assert together([replace(turn(1.0), contended=one) for one in (False, True)]).contended
    assert together([turn(1.0)]).contended is None
    assert contention_notes([(row.num_contended, row.num_turns) for row in rows], "turns") == [
        "Other processes took 10% of the cores or more during 1 of 4 turns: they are marked."
    ]
    assert contention_notes([(0, 2)], "turns") == []
    assert "not known" in contention_notes([(None, 2)], "turns")[0]


def test_a_stopped_grid_goes_on_with_the_turns_that_are_missing(
    text_pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.jsonl"
    small = options(text_pair, settings=("plain", "ngram-2"), batches=(1,), slices=("chat",), max_tokens=4, resume=path)
    whole, asked = batches_module.answer_all, 0

    def until_the_fourth(*given: object) -> Turn:
        nonlocal asked
        asked += 1
        if asked == 4:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(batches_module, "answer_all", until_the_fourth)
    assert run_batches(small).interrupted
    before = path.read_text(encoding="utf-8").splitlines()
    assert len(before) == 1 + 3
    report = run_batches(small)
    assert asked == 5
    assert not report.interrupted
    assert path.read_text(encoding="utf-8").splitlines()[:4] == before
    assert [(row.setting, row.num_turns, row.num_answers) for row in report.rows] == [
        ("plain", 2, 4),
        ("ngram-2", 2, 4),
    ]
    assert any("stopped and resumed" in caveat for caveat in report.caveats)
    with pytest.raises(InputError, match="max_tokens=4, this run has 5"):
        run_batches(replace(small, max_tokens=5))
