"""`foretoken bench --profile` and `foretoken simulate`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.bench import profile as profile_module
from foretoken.bench.profile import write_profile
from foretoken.plan.profile import Curve, DrafterCost, Profile
from tests.cli.conftest import Run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A second a step however many rows; guesses cost nothing."""
    target = {"name": "t", "max_context_tokens": 100, "block_tokens": 32}
    one = Curve(((1, 1.0),))
    costs = {"ngram": DrafterCost(Curve()), "draft_model": DrafterCost(Curve(((1, 0.1), (8, 0.8))))}
    return write_profile(Profile(target, {"cpu": "slow"}, {}, "", "2026-11-21", one, chunk=one, drafters=costs, caveats=("busy",)), tmp_path, "p")


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


def test_a_trace_with_chances_of_its_own_and_from_a_bench(foretoken: Run, profile: Path, trace: Path, bench: Path) -> None:
    """The chances 1, 0 emit two tokens a round, 1, 1, 0 three; nothing stands where nothing is said and the default is 0."""
    common = ["simulate", "--profile", profile, "--trace", trace, "--bench", bench, "--acceptance", 0, "--settings", "plain,ngram-4", "--json"]
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
    common = ["simulate", "--profile", profile, "--trace", "poisson:0.5", "--requests", 20, "--prompt-tokens", "4-16", "--output-tokens", "8"]
    done = foretoken(*common, "--replicas", 2, "--dispatch", "least_loaded", "--price-per-hour", "1")
    assert done.code == 0
    assert [name for name in ("plain", "ngram-auto", "draft_model-auto") if name in done.out] == ["plain", "ngram-auto", "draft_model-auto"]
    assert "against plain: " in done.out
    assert "predicted from 2026-11-21, slow" in done.out
    assert done.lines[-1] == "note: busy"
    assert foretoken(*common, "--json").lines[-1] == foretoken(*common, "--json").lines[-1] != foretoken(*common, "--seed", 1, "--json").lines[-1]


def test_bad_input(foretoken: Run, profile: Path, trace: Path) -> None:
    Path("broken.jsonl").write_text('{"prompt_tokens": 3, "output_tokens": 3}\n{"prompt_tokens": 0, "output_tokens": 3}\n')
    Path("odd.jsonl").write_text('{"prompt_tokens": 3, "output_tokens": 3, "arival_s": 3}\n')
    Path("empty.jsonl").write_text("\n")
    cases = [
        (2, ["--trace", "poisson:fast"], "must be poisson:RATE"),
        (2, ["--trace", "poisson:0"], "the rate must be above 0"),
        (2, ["--trace", "poisson:1", "--requests", 0], "requests=0"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "9-3"], "prompt_tokens='9-3'"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "100"], "the context holds 100 tokens"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "8", "--acceptance", "1.5"], "must be a chance from 0 to 1"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "8", "--acceptance", "code"], "no chances of this name were measured for ngram"),
        (2, ["--trace", "poisson:1", "--prompt-tokens", "8", "--settings", "eagle-3"], "it knows draft_model, ngram"),
        (2, ["--trace", "poisson:1", "--dispatch", "random"], "dispatch='random'"),
        (2, ["--trace", "poisson:1", "--price-per-hour", "-1"], "price_per_hour=-1.0"),
        (2, ["--trace", trace, "--output-tokens", "3"], "the trace file says it for each request"),
        (2, ["--trace", "broken.jsonl"], "trace line 2: prompt_tokens=0"),
        (2, ["--trace", "odd.jsonl"], "trace line 1='arival_s': unknown key"),
        (2, ["--trace", "empty.jsonl"], "holds no request"),
        (1, ["--trace", "poisson:1", "--prompt-tokens", "8", "--cache-tokens", "32"], "out of KV blocks"),
        (4, ["--trace", "nowhere.jsonl"], "trace: cannot read nowhere.jsonl"),
        (4, ["--trace", "poisson:1", "--bench", "odd.jsonl", "--profile", "nowhere.json"], "profile: cannot read nowhere.json"),
        (2, ["--trace", "poisson:1", "--bench", profile], "not a result of `foretoken bench"),
    ]
    for code, arguments, message in cases:
        done = foretoken("simulate", "--profile", profile, *arguments)
        assert (done.code, done.out) == (code, ""), (arguments, done.err)
        assert message in done.err, (arguments, done.err)


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
        "simulate", "--profile", file, "--trace", "poisson:100", "--requests", 5, "--prompt-tokens", 8, "--output-tokens", 8, "--json"
    )
    assert [row["setting"] for row in json.loads(simulated.lines[-1])["rows"]] == ["plain", "draft_model-auto", "ngram-auto"]
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
