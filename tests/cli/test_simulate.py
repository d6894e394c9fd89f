"""`foretoken bench --profile` and `foretoken simulate`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.bench import profile as profile_module
from foretoken.bench import validate_report
from foretoken.bench.profile import write_profile
from foretoken.plan.profile import Curve, DrafterCost, Profile
from tests.cli.conftest import Run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A second a step however many rows; guesses cost nothing."""
    target = {"name": "t", "max_context_tokens": 100, "block_tokens": 32}
    one = Curve(((1, 1.0),))
    costs = {"ngram": DrafterCost(Curve()), "draft_model": DrafterCost(Curve(((1, 0.1), (8, 0.8))))}
    return write_profile(
        Profile(target, {"cpu": "slow"}, {}, "", "2026-11-21", one, chunk=one, drafters=costs, caveats=("busy",)),
        tmp_path,
        "p",
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"arrival_s": 2.0, "prompt_tokens": 5, "output_tokens": 9, "acceptance": [1.0, 0.0]},
        {"prompt_tokens": 5, "output_tokens": 9, "acceptance": "code"},
        {"arrival_s": 2.0, "prompt_tokens": 50, "output_tokens": 9},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    rows = [
        {"drafter": "ngram", "slice": "code", "acceptance_per_position": [0.5]},
        {"drafter": "ngram", "slice": "code", "acceptance_per_position": [1.0, 1.0, 0.0]},
        {"drafter": None, "slice": "code", "acceptance_per_position": []},
    ]
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_a_trace_with_chances_of_its_own_and_from_a_bench(
    foretoken: Run, profile: Path, trace: Path, bench: Path
) -> None:
    """The chances 1, 0 emit two tokens a round, 1, 1, 0 three; nothing stands where nothing is said and the default is
    0.
    """
    common = [
        "simulate",
        "--profile",
        profile,
        "--trace",
        trace,
        "--bench",
        bench,
        "--acceptance",
        0,
        "--settings",
        "plain,ngram-4",
        "--json",
    ]
    done = foretoken(*common, "--price-per-hour", 3600)
    found = json.loads(done.lines[-1])
    plain, guessing = found["rows"]
    assert (done.code, [row["setting"] for row in found["rows"]]) == (0, ["plain", "ngram-4"])
    assert plain["num_tokens"] == guessing["num_tokens"] == 27
    # Plain: 9 steps a request, from 0 and from 2. Guessing: 1 + 3 steps from 0; 1 + 4 and 1 + 8 from 2.
    assert (plain["makespan_s"], plain["num_steps"]) == (11.0, 11)
    assert (guessing["makespan_s"], guessing["num_steps"]) == (11.0, 11)
    assert plain["price_per_million_tokens"] == pytest.approx(11 / 27 * 1e6)
    assert guessing["latency_s_p50"] == 5.0
    first = json.loads(foretoken(*common, "--requests", 2).lines[-1])["rows"]
    assert [row["num_requests"] for row in first] == [2, 2]


def test_random_arrivals_for_the_eye(foretoken: Run, profile: Path) -> None:
    common = [
        "simulate",
        "--profile",
        profile,
        "--trace",
        "poisson:0.5",
        "--requests",
        20,
        "--prompt-tokens",
        "4-16",
        "--output-tokens",
        "8",
    ]
    done = foretoken(*common, "--replicas", 2, "--dispatch", "least_loaded", "--price-per-hour", "1")
    assert done.code == 0
    assert [name for name in ("plain", "ngram-auto", "draft_model-auto") if name in done.out] == [
        "plain",
        "ngram-auto",
        "draft_model-auto",
    ]
    assert "against plain: " in done.out
    assert "predicted from 2026-11-21, slow" in done.out
    assert done.lines[-1] == "note: busy"
    assert (
        foretoken(*common, "--json").lines[-1]
        == foretoken(*common, "--json").lines[-1]
        != foretoken(*common, "--seed", 1, "--json").lines[-1]
    )


def test_bad_input(foretoken: Run, profile: Path, trace: Path) -> None:
    Path("broken.jsonl").write_text(
        '{"prompt_tokens": 3, "output_tokens": 3}\n{"prompt_tokens": 0, "output_tokens": 3}\n'
    )
    Path("odd.jsonl").write_text('{"prompt_tokens": 3, "output_tokens": 3, "arival_s": 3}\n')
    Path("empty.jsonl").write_text("\n")
    cases = [
        (2, ["--trace", "poisson:fast"], "must be poisson:RATE"),
        (2, ["--trace", "poisson:0"], "the rate must be above 0"),
        (2, ["--trace", "poisson:1", "--requests", 0], "requests=0"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "9-3"], "prompt_tokens='9-3'"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "100"], "the context holds 100 tokens"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "8", "--acceptance", "1.5"], "must be a chance from 0 to 1"),
        (
            2,
            ["--trace", "poisson:1", "--prompt-tokens", "8", "--acceptance", "code"],
            "no chances of this name were measured for ngram",
        ),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "8", "--settings", "eagle-3"], "it knows draft_model, ngram"),
        (2, ["--trace", "poisson:1", "--dispatch", "random"], "dispatch='random'"),
        (
            2,
            ["--trace", "poisson:1", "--max-step-tokens", "16"],
            "max_step_tokens=16: must be more than max_batch_size, 16",
        ),
        (2, ["--trace", "poisson:1", "--cache-reserve", "1.5"], "cache_reserve=1.5: must be a number from 0 to 1"),
        (2, ["--trace", "poisson:1", "--price-per-hour", "-1"], "price_per_hour=-1.0"),
        (2, ["--trace", trace, "--output-tokens", "3"], "the trace file says it for each request"),
        (2, ["--trace", "broken.jsonl"], "trace line 2: prompt_tokens=0"),
        (2, ["--trace", "odd.jsonl"], "trace line 1='arival_s': unknown key"),
        (2, ["--trace", "empty.jsonl"], "holds no request"),
        (1, ["--trace", "poisson:1", "--prompt-tokens", "8", "--cache-tokens", "32"], "out of KV blocks"),
        (4, ["--trace", "nowhere.jsonl"], "trace: cannot read nowhere.jsonl"),
        (2, ["--trace", "stedy"], "trace='stedy': is no file and no built-in trace; choose one of steady, bursts"),
        (
            4,
            ["--trace", "poisson:1", "--bench", "odd.jsonl", "--profile", "nowhere.json"],
            "profile: cannot read nowhere.json",
        ),
        (2, ["--trace", "poisson:1", "--bench", profile], "not a result of `foretoken bench"),
        (2, ["--trace", "steady,ramp"], "one trace at a time"),
        (2, ["--trace", "steady", "--requests", 5], "the trace steady says it for each request"),
        (2, ["--trace", "steady", "--acceptance", "0.5"], "the trace steady says it for each request"),
        (
            2,
            ["--trace", "poisson:1", "--trace-seconds", 5],
            "goes with the built-in traces steady, bursts, ramp, overload only",
        ),
        (2, ["--trace", "steady", "--trace-seconds", 0], "trace_seconds=0.0"),
        (
            2,
            ["--trace", "poisson:1", "--draft", "reference:draft"],
            "draft='reference:draft': is read with --measure only",
        ),
        (2, ["--trace", "poisson:1", "--out", "results"], "is read with --measure only"),
        (2, ["--trace", "poisson:1", "--measure"], "does not go with --measure, which profiles one engine itself"),
    ]
    for code, arguments, message in cases:
        done = foretoken("simulate", "--profile", profile, *arguments)
        assert (done.code, done.out) == (code, ""), (arguments, done.err)
        assert message in done.err, (arguments, done.err)


def test_built_in_traces_fit_the_profile(foretoken: Run, profile: Path) -> None:
    """Twice as long, about twice as many requests."""
    rows = []
    for seconds in (500, 1000):
        done = foretoken(
            "simulate",
            "--profile",
            _longer(profile),
            "--trace",
            "ramp",
            "--trace-seconds",
            seconds,
            "--settings",
            "plain",
            "--json",
        )
        assert done.code == 0, done.err
        rows += json.loads(done.lines[-1])["rows"]
    assert rows[1]["num_requests"] == pytest.approx(2 * rows[0]["num_requests"], rel=0.25)


def _longer(profile: Path) -> Path:
    """The same with a context that a built-in trace fits into."""
    raw = json.loads(profile.read_text())
    raw["target"]["max_context_tokens"] = 2048
    path = profile.with_name("longer.json")
    path.write_text(json.dumps(raw))
    return path


def test_measured_for_real(foretoken: Run, text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted, measured and error of each setting, on the eye's table and in the file with everything needed to judge
    it.
    """
    for name in ("_ROWS", "_BATCHES", "_GUESSES", "_DRAFT_BATCHES"):
        monkeypatch.setattr(profile_module, name, getattr(profile_module, name)[:2])
    monkeypatch.setattr(validate_report, "_MOST_PASSES", 1)
    Path("mine.jsonl").write_text(
        "\n".join(json.dumps({"arrival_s": 0.01 * i, "prompt_tokens": 9, "output_tokens": 4}) for i in range(6))
    )
    common = [
        "simulate",
        "--measure",
        "-t",
        text_pair.target,
        "--trace",
        "mine.jsonl",
        "--settings",
        "plain,ngram-2",
        "--out",
        "results",
    ]
    done = foretoken(*common)
    assert done.code == 0, done.err
    assert "within 15% in throughput and p95 latency: " in done.out
    assert [line for line in done.err.splitlines() if "calibration" in line] == [
        "plain: calibration",
        "ngram-2: calibration",
    ]
    (file,) = Path("results").iterdir()
    assert done.lines[-1] == f"written: {file}"
    raw = json.loads(file.read_text())
    assert {"command", "machine", "date", "versions", "options", "profile", "tolerance", "caveats"} <= set(raw)
    assert [(row["trace"], row["setting"], len(row["requests"])) for row in raw["rows"]] == [
        ("mine.jsonl", name, 6) for name in ("plain", "ngram-2")
    ]
    for row in raw["rows"]:
        assert row["predicted"]["num_tokens"] == row["measured"]["num_tokens"] == 24
        assert row["holds"] == all(abs(row["errors"][name]) <= raw["tolerance"] for name in raw["judged"])
        assert row["errors"]["latency_s_p95"] == pytest.approx(
            row["predicted"]["latency_s_p95"] / row["measured"]["latency_s_p95"] - 1
        )
    second = foretoken(
        *common, "--name", "again", "--requests", 2, "--acceptance", "text", "--settings", "plain", "--json"
    )
    told = json.loads(second.lines[-1])
    assert told["file"].endswith("-again.json")
    assert [[job["acceptance"] for job in row["jobs"]] for row in told["rows"]] == [["text", "text"]]


def test_what_cannot_be_measured_for_real(foretoken: Run, text_pair: SimpleNamespace) -> None:
    common = ["simulate", "--measure", "-t", text_pair.target]
    cases = [
        (["--trace", "steady", "--settings", "draft_model-4"], "drafter draft_model needs a draft"),
        (["--trace", "steady", "--settings", "predicted-4"], "needs a prediction for each prompt"),
        (["--trace", "steady", "--settings", "eagle-4"], "drafters='eagle'"),
        (["--trace", "steady", "--threads", 0], "threads=0"),
        (["--trace", "steady", "--name", "a/b"], "name='a/b'"),
        (["--trace", "steady", "--replicas", 2], "does not go with --measure"),
        (["--trace", "steady", "--max-step-tokens", 3], "max_step_tokens=3"),
        (["--trace", "steady", "--cache-reserve", -0.1], "cache_reserve=-0.1"),
        (
            ["--trace", "poisson:1", "--requests", 2, "--prompt-tokens", 9, "--acceptance", "0.5"],
            "a real run needs texts",
        ),
        (["--trace", "poisson:1", "--requests", 2, "--prompt-tokens", 400], "the context holds 256 tokens"),
    ]
    for arguments, message in cases:
        done = foretoken(*common, *arguments)
        assert (done.code, done.out) == (2, ""), (arguments, done.err)
        assert message in done.err, (arguments, done.err)
    assert "profile=None: give the file of" in foretoken("simulate", "--trace", "steady").err


def test_measured_then_simulated(foretoken: Run, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bench writes is what the simulator reads."""
    for name in ("_ROWS", "_BATCHES", "_GUESSES", "_DRAFT_BATCHES", "_PROMPTS", "_CONTEXTS"):
        monkeypatch.setattr(profile_module, name, getattr(profile_module, name)[:2])
    common = ["bench", "--profile", "-t", pair.target, "--draft", pair.draft, "--out", "results"]
    done = foretoken(*common)
    (file,) = Path("results").iterdir()
    assert (done.code, file.name.endswith("-profile.json")) == (0, True)
    assert done.lines[-1] == f"written: {file}"
    told = json.loads(foretoken(*common, "--drafters", "ngram", "--name", "mine", "--json").lines[-1])
    assert told["file"].endswith("-mine.json")
    assert list(told["drafters"]) == ["ngram"]
    assert told["command"].startswith("foretoken")
    simulated = foretoken(
        "simulate",
        "--profile",
        file,
        "--trace",
        "poisson:100",
        "--requests",
        5,
        "--prompt-tokens",
        8,
        "--output-tokens",
        8,
        "--json",
    )
    assert [row["setting"] for row in json.loads(simulated.lines[-1])["rows"]] == [
        "plain",
        "draft_model-auto",
        "ngram-auto",
    ]
    without = foretoken("bench", "--profile", "-t", pair.target, "--json")  # no draft named: drafters that need none
    assert list(json.loads(without.lines[-1])["drafters"]) == ["ngram"]


def test_a_profile_takes_no_other_options_of_the_bench(foretoken: Run, pair: SimpleNamespace) -> None:
    cases = [
        (["--repeats", 2], "repeats=2: does not go with --profile"),
        (["--peers"], "peers=True: does not go with --profile"),
        (["--drafters", "eagle"], "drafters='eagle'"),
        (["--drafters", "draft_model"], "draft_model needs a draft"),
        (["--name", "a/b"], "name='a/b'"),
    ]
    for arguments, message in cases:
        done = foretoken("bench", "--profile", "-t", pair.target, *arguments)
        assert (done.code, done.out) == (2, ""), done.err
        assert message in done.err
