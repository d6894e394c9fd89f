"""The study of the simulator from its command line: settings compared on traces, and what cannot be validated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SpecConfig
from foretoken.measure.speed import profile as profile_module
from foretoken.plan.profile import Curve, DrafterCost
from foretoken.simulate.inputs import Job, Limits, SimSetting
from foretoken.simulate.sim_request import Record, Records, chain
from foretoken.simulate.simulate import simulate
from studies.validation import run as run_module
from studies.validation.__main__ import main
from studies.validation.validate import ValidationPlan, compare, median_profile
from tests.simulate.test_simulate import CURVED, UNIT


@pytest.mark.repeated
def test_settings_are_compared_on_traces(text_pair: SimpleNamespace) -> None:
    """The whole way on a tiny checkpoint: calibrated, simulated, run; what both count alike is equal."""
    jobs = [Job(0.002 * i, 8 + i, 6, ("code", "text")[i % 2]) for i in range(8)]
    words: list[str] = []
    settings = (
        SimSetting(),
        SimSetting(("ngram",), 3),
        SimSetting(("ngram",), None),
        SimSetting(("draft_model",), None),
    )
    specs = {"ngram": SpecConfig("ngram"), "draft_model": SpecConfig("draft_model", str(text_pair.draft))}
    with LLM(text_pair.target, dtype="float32") as llm:
        for spec in specs.values():
            llm.prepare(spec)
        limits = Limits(cache_tokens=llm.target.capacity_tokens, max_context_tokens=llm.target.max_context_tokens)
        trial = ValidationPlan(settings, {"mine": jobs, "steady": None}, limits, seconds=0.2, calibration_requests=12)
        cost = DrafterCost(Curve(((1, 0.001),)))
        profile = replace(
            UNIT, rows=Curve(((1, 0.002),)), chunk=Curve(((1, 0.002),)), drafters={"ngram": cost, "draft_model": cost}
        )
        found = compare(llm, llm.encode, profile, specs, trial, lambda said, _: words.append(said))
    names = [setting.name for setting in settings]
    assert [(one.predicted.setting, one.trace) for one in found] == [
        (name, trace) for name in names for trace in ("mine", "steady")
    ]
    for one in found:
        assert one.predicted.num_tokens == one.measured.num_tokens == sum(job.output_tokens for job in one.jobs)
        assert len(one.requests) == len(one.jobs)
        assert one.error("tokens_per_s") == pytest.approx(one.predicted.tokens_per_s / one.measured.tokens_per_s - 1)
        assert one.causes.pace > -1
        assert one.trace == "steady" or one.jobs == tuple(jobs)
    assert found[0].causes.emitted == found[0].causes.rows == 0.0
    assert found[0].causes.draft is None
    begun = [said for said in dict.fromkeys(words) if "calibration" in said]
    assert begun == [*(f"{name}: calibration" for name in names), "draft_model-auto: calibration, free"]
    assert words.count("ngram-3: mine") == 1 + 8


def test_passes_are_put_together_by_their_medians() -> None:
    passes = [
        replace(CURVED, rows=Curve(((1, seconds), (2, 5.0))), caveats=(note,))
        for seconds, note in ((1.0, "a"), (9.0, "b"), (2.0, "a"))
    ]
    short = replace(passes[0], rows=Curve(((1, 1.5),)))
    assert median_profile(passes).rows == Curve(((1, 2.0), (2, 5.0)))
    assert median_profile(passes).caveats == ("a", "b")
    assert median_profile(passes).drafters == CURVED.drafters
    assert median_profile([*passes, short]).rows == Curve(((1, 1.75),))


def test_records_of_a_slice_are_drawn_from() -> None:
    """Several answers under one name: each job goes the way of one, and all of them are met."""
    jobs = [Job(float(50 * i), 3, 30, "code") for i in range(20)]
    known = {"ngram": {"code": Records(tuple(Record((chain(2, kept),)) for kept in (0, 2)))}}
    ended = simulate(UNIT, jobs, SimSetting(("ngram",), 2), Limits(), known=known)
    assert {course.num_accepted for course in ended.requests} == {0, 20 - 1}


def test_the_study_from_its_command_line(
    text_pair: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Predicted, measured and error of each setting: printed, and written with everything needed to judge it."""
    monkeypatch.chdir(tmp_path)
    for name in ("_ROWS", "_BATCHES", "_NUM_DRAFT", "_DRAFT_BATCHES"):
        monkeypatch.setattr(profile_module, name, getattr(profile_module, name)[:2])
    monkeypatch.setattr(run_module, "_MAX_PASSES", 1)
    Path("mine.jsonl").write_text(
        "\n".join(json.dumps({"arrival_s": 0.01 * i, "prompt_tokens": 9, "output_tokens": 4}) for i in range(6))
    )
    common = ["--target", str(text_pair.target), "--arrivals", "mine.jsonl", "--out", "results"]
    assert main([*common, "--settings", "plain,ngram-2"]) == 0
    out, err = capsys.readouterr()
    assert "within 15% in throughput and p95 latency: " in out
    assert [line for line in err.splitlines() if "calibration" in line] == [
        "plain: calibration",
        "ngram-2: calibration",
    ]
    (file,) = Path("results").glob("*.json")
    assert f"written: {file}" in out
    assert "| mine.jsonl | ngram-2 |" in file.with_suffix(".md").read_text()
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
    more = ["--name", "again", "--requests", "2", "--acceptance", "text", "--settings", "plain", "--json"]
    assert main([*common, *more]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["files"][0].endswith("-again.json")
    assert [[job["acceptance"] for job in row["jobs"]] for row in told["rows"]] == [["text", "text"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arrivals", "steady", "--settings", "draft_model-4"], "drafter draft_model needs a draft"),
        (["--arrivals", "steady", "--settings", "predicted-4"], "needs a prediction for each prompt"),
        (["--arrivals", "steady", "--settings", "eagle-4"], "drafters='eagle'"),
        (["--arrivals", "steady", "--name", "a/b"], "name='a/b'"),
        (["--arrivals", "steady", "--requests", "2"], "the built-in arrivals steady set it for each request"),
        (["--arrivals", "steady", "--max-step-tokens", "3"], "max_step_tokens=3"),
        (["--arrivals", "steady", "--cache-reserve", "-0.1"], "cache_reserve=-0.1"),
        (
            ["--arrivals", "poisson:1", "--requests", "2", "--prompt-tokens", "9", "--acceptance", "0.5"],
            "a real run needs texts",
        ),
        (["--arrivals", "poisson:1", "--requests", "2", "--prompt-tokens", "400"], "the context holds 256 tokens"),
    ],
)
def test_what_cannot_be_validated_is_refused(
    text_pair: SimpleNamespace, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--target", str(text_pair.target), *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
