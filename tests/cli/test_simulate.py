"""`foretoken bench profile` and `foretoken simulate`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.measure.speed import profile as profile_module
from foretoken.measure.speed.profile import write_profile
from foretoken.plan.profile import Curve, DrafterCost, Profile
from tests.cli.conftest import Run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A second a step however many rows; draft tokens cost nothing."""
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
        "--arrivals",
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
    plain, drafting = found["rows"]
    assert (done.code, [row["setting"] for row in found["rows"]]) == (0, ["plain", "ngram-4"])
    assert plain["num_tokens"] == drafting["num_tokens"] == 27
    # Plain: 9 steps a request, from 0 and from 2. Drafting: 1 + 3 steps from 0; 1 + 4 and 1 + 8 from 2.
    assert (plain["makespan_s"], plain["num_steps"]) == (11.0, 11)
    assert (drafting["makespan_s"], drafting["num_steps"]) == (11.0, 11)
    assert plain["price_per_million_tokens"] == pytest.approx(11 / 27 * 1e6)
    assert drafting["latency_s_p50"] == 5.0
    first = json.loads(foretoken(*common, "--requests", 2).lines[-1])["rows"]
    assert [row["num_requests"] for row in first] == [2, 2]


def test_random_arrivals_for_the_eye(foretoken: Run, profile: Path) -> None:
    common = [
        "simulate",
        "--profile",
        profile,
        "--arrivals",
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
    assert "tokens per second against plain: ngram-auto " in done.out
    assert "median time of a whole answer against plain: ngram-auto " in done.out
    assert "predicted from 2026-11-21, slow" in done.out
    assert done.lines[-1] == "note: busy"
    assert (
        foretoken(*common, "--json").lines[-1]
        == foretoken(*common, "--json").lines[-1]
        != foretoken(*common, "--seed", 1, "--json").lines[-1]
    )


def test_an_acceptance_that_nobody_gave_is_said(foretoken: Run, profile: Path) -> None:
    common = ["simulate", "--profile", profile, "--arrivals", "poisson:0.5", "--requests", 3, "--prompt-tokens", 8]
    common += ["--output-tokens", 8, "--json", "--settings"]
    told = json.loads(foretoken(*common, "plain,ngram-4").lines[-1])
    assert told["acceptance"] == "0.7"
    assert told["caveats"][0].startswith("No --acceptance was given: a draft token is taken to be accepted")
    for given in (["plain"], ["plain,ngram-4", "--acceptance", "0.7"]):
        assert json.loads(foretoken(*common, *given).lines[-1])["caveats"] == ["busy"]
    Path("own.jsonl").write_text('{"prompt_tokens": 5, "output_tokens": 9, "acceptance": 0.5}\n')
    own = ["simulate", "--profile", profile, "--arrivals", "own.jsonl", "--settings", "ngram-4", "--json"]
    assert json.loads(foretoken(*own).lines[-1])["caveats"] == ["busy"]


def test_bad_input(foretoken: Run, profile: Path, trace: Path) -> None:
    Path("broken.jsonl").write_text(
        '{"prompt_tokens": 3, "output_tokens": 3}\n{"prompt_tokens": 0, "output_tokens": 3}\n'
    )
    Path("odd.jsonl").write_text('{"prompt_tokens": 3, "output_tokens": 3, "arival_s": 3}\n')
    Path("empty.jsonl").write_text("\n")
    cases = [
        (2, ["--arrivals", "poisson:fast"], "must be poisson:RATE"),
        (2, ["--arrivals", "poisson:0"], "arrivals='poisson:0': the rate must be above 0"),
        (2, ["--arrivals", "poisson:1", "--requests", 0], "requests=0"),
        (2, ["--arrivals", "poisson:1", "--prompt-tokens", "9-3"], "prompt_tokens='9-3'"),
        (2, ["--arrivals", "poisson:1", "--prompt-tokens", "9-1000000000"], "prompt_tokens=1000000000: must be at"),
        (2, ["--arrivals", "poisson:1", "--prompt-tokens", "100"], "the context holds 100 tokens"),
        (2, ["--arrivals", "poisson:1", "--prompt-tokens", "8", "--acceptance", "1.5"], "must be a chance from 0 to 1"),
        (
            2,
            ["--arrivals", "poisson:1", "--prompt-tokens", "8", "--acceptance", "code"],
            "no chances of this name were measured for ngram",
        ),
        (
            2,
            ["--arrivals", "poisson:1", "--prompt-tokens", "8", "--settings", "eagle-3"],
            "it knows draft_model, ngram",
        ),
        (2, ["--arrivals", "poisson:1", "--dispatch", "random"], "dispatch='random'"),
        (
            2,
            ["--arrivals", "poisson:1", "--max-step-tokens", "16"],
            "max_step_tokens=16: must be more than max_batch_size, 16",
        ),
        (2, ["--arrivals", "poisson:1", "--cache-reserve", "1.5"], "cache_reserve=1.5: must be a number from 0 to 1"),
        (2, ["--arrivals", "poisson:1", "--price-per-hour", "-1"], "price_per_hour=-1.0"),
        (2, ["--arrivals", trace, "--output-tokens", "3"], "the file of arrivals sets it for each request"),
        (2, ["--arrivals", "broken.jsonl"], "trace line 2: prompt_tokens=0"),
        (2, ["--arrivals", "odd.jsonl"], "trace line 1='arival_s': unknown key"),
        (2, ["--arrivals", "empty.jsonl"], "holds no request"),
        (1, ["--arrivals", "poisson:1", "--prompt-tokens", "8", "--cache-tokens", "32"], "out of KV blocks"),
        (4, ["--arrivals", "nowhere.jsonl"], "arrivals: cannot read nowhere.jsonl"),
        (2, ["--arrivals", "stedy"], "arrivals='stedy': is no file and no built-in name; choose one of steady, bursts"),
        (
            4,
            ["--arrivals", "poisson:1", "--bench", "odd.jsonl", "--profile", "nowhere.json"],
            "profile: cannot read nowhere.json",
        ),
        (2, ["--arrivals", "poisson:1", "--bench", profile], "not a result of `foretoken bench"),
        (2, ["--arrivals", "steady,ramp"], "name one; several are not simulated in one run"),
        (2, ["--arrivals", "steady", "--requests", 5], "the built-in arrivals steady set it for each request"),
        (2, ["--arrivals", "steady", "--acceptance", "0.5"], "the built-in arrivals steady set it for each request"),
        (
            2,
            ["--arrivals", "poisson:1", "--duration-s", 5],
            "applies to the built-in arrivals steady, bursts, ramp, overload only",
        ),
        (2, ["--arrivals", "steady", "--duration-s", 0], "duration_s=0.0"),
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
            "--arrivals",
            "ramp",
            "--duration-s",
            seconds,
            "--settings",
            "plain",
            "--json",
        )
        assert done.code == 0, done.err
        rows += json.loads(done.lines[-1])["rows"]
    assert rows[1]["num_requests"] == pytest.approx(2 * rows[0]["num_requests"], rel=0.25)


def test_built_in_traces_need_the_acceptance_of_their_slices(foretoken: Run, profile: Path) -> None:
    done = foretoken("simulate", "--profile", _longer(profile), "--arrivals", "ramp", "--settings", "plain,ngram-4")
    assert (done.code, done.out) == (2, "")
    assert "bench=None: requests of ramp are of the slices code, docstring, whose acceptance" in done.err


def _longer(profile: Path) -> Path:
    """The same with a context that a built-in trace fits into."""
    raw = json.loads(profile.read_text())
    raw["target"]["max_context_tokens"] = 2048
    path = profile.with_name("longer.json")
    path.write_text(json.dumps(raw))
    return path


def test_measured_then_simulated(foretoken: Run, pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bench writes is what the simulator reads."""
    for name in ("_ROWS", "_BATCHES", "_NUM_DRAFT", "_DRAFT_BATCHES", "_PROMPTS", "_CONTEXTS"):
        monkeypatch.setattr(profile_module, name, getattr(profile_module, name)[:2])
    common = ["bench", "profile", "-t", pair.target, "--draft", pair.draft, "--out", "results"]
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
        "--arrivals",
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
        "suffix-auto",
    ]
    without = foretoken("bench", "profile", "-t", pair.target, "--json")  # no draft named: drafters that need none
    assert list(json.loads(without.lines[-1])["drafters"]) == ["ngram", "suffix"]


def test_a_profile_takes_no_other_options_of_the_bench(foretoken: Run, pair: SimpleNamespace) -> None:
    cases = [
        (["--repeats", 2], "no such option: --repeats; use foretoken bench speed"),
        (["--peers"], "no such option: --peers; use foretoken bench speed"),
        (["--drafters", "eagle"], "drafters='eagle'"),
        (["--drafters", "draft_model"], "draft_model needs a draft"),
        (["--name", "a/b"], "name='a/b'"),
    ]
    for arguments, message in cases:
        done = foretoken("bench", "profile", "-t", pair.target, *arguments)
        assert (done.code, done.out) == (2, ""), done.err
        assert message in done.err


def test_a_profile_is_needed(foretoken: Run) -> None:
    assert "profile=None: give the file of" in foretoken("simulate", "--arrivals", "steady").err
