"""`foretoken bench load` from the command line, and the default command of the group."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.measure.load.options import DEFAULT_SETTINGS, LoadOptions
from tests.cli.conftest import Run

LIMITS = (
    *("max_batch_size", "max_prompt_tokens", "max_step_tokens", "cache_tokens", "cache_reserve"),
    *("min_tokens_to_speculate", "max_speculating_requests"),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What each kind of run was asked for, in place of the run."""
    found: dict[str, object] = {}

    def stand_in(kind: str):
        def run(options: object, command: str) -> SimpleNamespace:
            found[kind] = options
            return SimpleNamespace(
                interrupted=found.get("stop", False),
                results={"strict_differing": found.get("differing", 0)},
                json_line=lambda: json.dumps({"kind": kind, "command": command}),
            )

        return run

    monkeypatch.setattr("foretoken.measure.load.run.run_batches", stand_in("batches"))
    monkeypatch.setattr("foretoken.measure.speed.run.run_speed", stand_in("speed"))
    return found


def test_batches_are_measured_with_what_was_asked(foretoken: Run, asked: dict[str, object]) -> None:
    given = ("--batches", "1,8", "--slices", "code,chat", "--settings", "plain,ngram-2", "--json")
    done = foretoken("bench", "load", *given)
    assert done.code == 0
    assert json.loads(done.lines[-1])["kind"] == "batches"
    options = asked["batches"]
    assert (options.batches, options.slices, options.settings) == ((1, 8), ("code", "chat"), ("plain", "ngram-2"))
    assert (options.draft, options.max_tokens, options.repeats, options.name) == (None, 48, 2, "batches")


def test_without_options_the_usual_grid_is_measured(foretoken: Run, asked: dict[str, object]) -> None:
    assert foretoken("bench", "load", "--json").code == 0
    without = tuple(name for name in DEFAULT_SETTINGS if not name.startswith("draft_model"))
    assert asked["batches"] == LoadOptions("smollm2", settings=without)
    assert foretoken("bench", "load", "--draft", "reference:draft", "--json").code == 0
    assert asked["batches"] == LoadOptions("smollm2", "reference:draft")


def test_a_setting_from_the_environment_counts(
    foretoken: Run, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETOKEN_BENCH__LOAD__MAX_TOKENS", "20")
    assert foretoken("bench", "load", "--batches", "1", "--json").code == 0
    assert asked["batches"].max_tokens == 20


def test_without_a_draft_its_settings_are_left_out(foretoken: Run, asked: dict[str, object], tmp_path) -> None:
    assert foretoken("bench", "load", "--target", tmp_path, "--json").code == 0
    assert asked["batches"].settings == ("plain", "ngram-2", "ngram-5", "ngram-auto", "auto")
    assert asked["batches"].draft is None


def test_limits_and_rules_of_the_engine(foretoken: Run, asked: dict[str, object]) -> None:
    """The rest keeps its default."""
    limits = (
        *("--max-batch-size", "3", "--max-prompt-tokens", "64", "--max-step-tokens", "20"),
        *("--cache-tokens", "640", "--cache-reserve", "0.3"),
    )
    rules = ("--min-tokens-to-speculate", "4", "--max-speculating-requests", "2")
    assert foretoken("bench", "load", "--batches", "4", *limits, *rules, "--json").code == 0
    options = asked["batches"]
    assert (options.max_batch_size, options.max_prompt_tokens, options.max_step_tokens) == (3, 64, 20)
    assert (options.cache_tokens, options.cache_reserve) == (640, 0.3)
    assert (options.routing.min_tokens_to_speculate, options.routing.max_speculating_requests) == (4, 2)
    assert foretoken("bench", "load", "--batches", "4", "--max-step-tokens", "40", "--json").code == 0
    assert replace(asked["batches"], max_step_tokens=None) == replace(
        options, **{f.name: f.default for f in fields(options) if f.name in LIMITS}
    )


def test_strict_numerics_are_a_gate(foretoken: Run, asked: dict[str, object], tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    assert foretoken("bench", "load", "--numerics", "strict", "--resume", kept, "--json").code == 0
    assert (asked["batches"].numerics, asked["batches"].resume) == ("strict", kept)
    asked["differing"] = 2
    failed = foretoken("bench", "load", "--json")
    assert failed.code == 5
    assert "2 greedy outputs differ" in failed.err


def test_an_interrupted_run_prints_what_there_is_and_says_so(foretoken: Run, asked: dict[str, object]) -> None:
    asked["stop"] = True
    done = foretoken("bench", "load", "--batches", "1", "--json")
    assert done.code == 130
    assert json.loads(done.lines[-1])["kind"] == "batches"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--load", "mixed"), "python -m studies.changing_load --load"),
        (("--drafters", "ngram"), "foretoken bench speed --drafters"),
        (("--batches", "x"), "batches"),
        (("--slices", "poems"), "slices"),
        (("--cache-reserve", "2"), "cache_reserve"),
        (("--settings", "plain", "--min-tokens-to-speculate", "2"), "min_tokens_to_speculate"),
        (("--peers",), "--peers"),
    ],
)
def test_options_without_effect_are_refused(
    foretoken: Run, asked: dict[str, object], arguments: tuple[str, ...], field: str
) -> None:
    done = foretoken("bench", "load", *arguments)
    assert done.code == 2
    assert field in done.err
    assert not asked


# ---- the group


def test_speed_runs_where_nothing_is_named(foretoken: Run, asked: dict[str, object]) -> None:
    for words in (("--max-tokens", "9", "--json"), ("speed", "--max-tokens", "9", "--json")):
        assert foretoken("bench", *words).code == 0
        assert asked.pop("speed").max_tokens == 9
    assert foretoken("bench", "--json").code == 0
    assert (asked["speed"].draft, asked["speed"].drafters) == (None, ("ngram", "suffix"))
    assert foretoken("bench", "--draft", "reference:draft", "--json").code == 0
    assert asked["speed"].drafters == ("draft_model", "ngram", "suffix")
    assert foretoken("bench", "--draft", "reference:draft", "--drafters", "draft_model", "--json").code == 0
    assert asked["speed"].drafters == ("draft_model",)


@pytest.mark.parametrize(
    ("arguments", "use"),
    [
        (("--batches", "1"), "foretoken bench load --batches"),
        (("--json", "--settings=plain"), "foretoken bench load --settings"),
        (("--trace", "mixed"), "python -m studies.changing_load --load"),
        (("--profile",), "foretoken bench profile"),
        (("--recovery",), "python -m studies.recovery"),
    ],
)
def test_an_option_of_another_command_is_refused_with_its_name(
    foretoken: Run, asked: dict[str, object], arguments: tuple[str, ...], use: str
) -> None:
    done = foretoken("bench", *arguments)
    assert (done.code, done.out) == (2, "")
    assert use in done.err
    assert not asked


def test_settings_of_the_group_are_those_of_speed(
    foretoken: Run, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[bench] and FORETOKEN_BENCH__ are read by `bench` and `bench speed`, [bench.load] by `bench load` alone."""
    Path("foretoken.toml").write_text("[bench]\nmax_tokens = 7\n[bench.load]\nmax_tokens = 8\n")
    monkeypatch.setenv("FORETOKEN_BENCH__REPEATS", "5")
    for words in (("bench",), ("bench", "speed")):
        assert foretoken(*words, "--json").code == 0
        assert (asked["speed"].max_tokens, asked["speed"].repeats) == (7, 5)
    assert foretoken("bench", "load", "--json").code == 0
    assert (asked["batches"].max_tokens, asked["batches"].repeats) == (8, 2)
    shown = json.loads(foretoken("config", "show", "--json").lines[-1])
    assert shown["bench.max_tokens"] == {"value": 7, "origin": "foretoken.toml"}
    assert shown["bench load.max_tokens"]["value"] == 8
    monkeypatch.setenv("FORETOKEN_BENCH__REPEATS", "0")
    assert "set by FORETOKEN_BENCH__REPEATS" in foretoken("bench", "--json").err


@pytest.mark.parametrize("table", ["[bench.speed]\nmax_tokens = 7\n", "[bench]\nbatches = '1'\n"])
def test_settings_that_nothing_reads_are_refused(foretoken: Run, asked: dict[str, object], table: str) -> None:
    Path("foretoken.toml").write_text(table)
    done = foretoken("bench", "--json")
    assert (done.code, done.out) == (2, "")
    assert "of [bench] in foretoken.toml" in done.err


def test_speed_reads_its_lists_and_ends_with_a_code_of_its_own(
    foretoken: Run, asked: dict[str, object], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    given = ("--numerics", "default,strict", "--resume", kept, "--prompts-per-slice", "10", "--json")
    assert foretoken("bench", "speed", *given).code == 0
    assert asked["speed"].numerics == ("default", "strict")
    assert (asked["speed"].resume, asked["speed"].prompts_per_slice, asked["speed"].warm) == (kept, 10, False)
    asked["differing"] = 2
    failed = foretoken("bench", "speed", "--json")
    assert failed.code == 5
    assert "2 greedy outputs differ" in failed.err
    asked["stop"] = True
    assert foretoken("bench", "speed", "--warm", "--json").code == 130
    assert asked["speed"].warm
