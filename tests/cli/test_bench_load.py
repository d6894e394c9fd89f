"""`foretoken bench --batches`, `--trace` and `--recovery` from the command line: what goes with what, and what is
printed.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from foretoken.cli import bench_load
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
                interrupted=found.get("stop", False), json_line=lambda: json.dumps({"kind": kind, "command": command})
            )

        return run

    monkeypatch.setattr(bench_load, "_RUNS", {kind: stand_in(kind) for kind in ("batches", "trace", "recovery")})
    return found


def test_batches_are_measured_with_what_was_asked(foretoken: Run, asked: dict[str, object]) -> None:
    done = foretoken(
        "bench",
        "--batches",
        "1,8",
        "--slices",
        "code,chat",
        "--settings",
        "plain,ngram-2,table",
        "--table",
        "1:3",
        "--json",
    )
    assert done.code == 0
    assert json.loads(done.lines[-1])["kind"] == "batches"
    options = asked["batches"]
    assert (options.batches, options.slices, options.settings, options.table) == (
        (1, 8),
        ("code", "chat"),
        ("plain", "ngram-2", "table"),
        {1: 3},
    )
    assert (options.draft, options.max_tokens, options.repeats, options.name) == ("reference:draft", 48, 2, "batches")


def test_a_setting_from_the_environment_counts(
    foretoken: Run, asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORETOKEN_BENCH__MAX_TOKENS", "20")
    assert foretoken("bench", "--batches", "1", "--json").code == 0
    assert asked["batches"].max_tokens == 20


def test_without_a_draft_its_settings_are_left_out(foretoken: Run, asked: dict[str, object], tmp_path) -> None:
    assert foretoken("bench", "--batches", "1", "--target", tmp_path, "--json").code == 0
    assert asked["batches"].settings == ("plain", "ngram-2", "ngram-5", "table", "ema", "ngram-auto", "auto")
    assert asked["batches"].draft is None


def test_a_trace_and_recovery(foretoken: Run, asked: dict[str, object]) -> None:
    assert foretoken("bench", "--trace", "2:code,4:chat", "--phase-s", "1.5", "--json").code == 0
    assert [(phase.batch, phase.slice) for phase in asked["trace"].phases] == [(2, "code"), (4, "chat")]
    assert (asked["trace"].phase_s, asked["trace"].name) == (1.5, "trace")
    assert foretoken("bench", "--recovery", "--json").code == 0
    assert (asked["recovery"].batches, asked["recovery"].draft) == ((1, 4), None)
    assert foretoken("bench", "--recovery", "--batches", "2", "--name", "mine", "--json").code == 0
    assert (asked["recovery"].batches, asked["recovery"].name) == ((2,), "mine")


def test_limits_and_rules_of_the_engine(foretoken: Run, asked: dict[str, object]) -> None:
    """Whatever was named, for batches and for a trace alike; the rest is as ever."""
    limits = (
        "--max-batch-size",
        "3",
        "--max-prompt-tokens",
        "64",
        "--max-step-tokens",
        "20",
        "--cache-tokens",
        "640",
        "--cache-reserve",
        "0.3",
    )
    rules = ("--min-tokens-to-speculate", "4", "--max-speculating-requests", "2")
    for kind, value in (("batches", "4"), ("trace", "mixed")):
        assert foretoken("bench", f"--{kind}", value, *limits, *rules, "--json").code == 0
        options = asked[kind]
        assert (options.max_batch_size, options.max_prompt_tokens, options.max_step_tokens) == (3, 64, 20)
        assert (options.cache_tokens, options.cache_reserve) == (640, 0.3)
        assert (options.routing.min_tokens_to_speculate, options.routing.max_speculating_requests) == (4, 2)
        assert foretoken("bench", f"--{kind}", value, "--max-step-tokens", "40", "--json").code == 0
        assert replace(asked[kind], max_step_tokens=None) == replace(
            options, **{f.name: f.default for f in fields(options) if f.name in LIMITS}
        )


def test_an_interrupted_run_prints_what_there_is_and_says_so(foretoken: Run, asked: dict[str, object]) -> None:
    asked["stop"] = True
    done = foretoken("bench", "--batches", "1", "--json")
    assert done.code == 130
    assert json.loads(done.lines[-1])["kind"] == "batches"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--batches", "1", "--peers"), "peers"),
        (("--batches", "1", "--phase-s", "2"), "phase_s"),
        (("--trace", "mixed", "--slices", "code"), "slices"),
        (("--trace", "mixed", "--batches", "1"), "batches"),
        (("--recovery", "--settings", "plain"), "settings"),
        (("--recovery", "--trace", "mixed"), "trace"),
        (("--settings", "plain"), "settings"),
        (("--profile", "--batches", "1"), "profile"),
        (("--batches", "x"), "batches"),
        (("--batches", "1", "--slices", "poems"), "slices"),
        (("--batches", "1", "--table", "x"), "table"),
        (("--max-batch-size", "2"), "max_batch_size"),
        (("--recovery", "--max-step-tokens", "40"), "max_step_tokens"),
        (("--batches", "1", "--cache-reserve", "2"), "cache_reserve"),
        (("--batches", "1", "--settings", "plain", "--min-tokens-to-speculate", "2"), "min_tokens_to_speculate"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    foretoken: Run, asked: dict[str, object], arguments: tuple[str, ...], field: str
) -> None:
    done = foretoken("bench", *arguments)
    assert done.code == 2
    assert field in done.err
    assert not asked
