"""The short measurement, its file, and what a profile says of steps that were not measured. No time is asserted."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.backend.drafting import parse_drafters
from foretoken.engine.startup import profiling
from foretoken.errors import ConfigError, InputError, StorageError
from foretoken.measure.speed import profile as module
from foretoken.measure.speed.options import ProfileOptions
from foretoken.measure.speed.profile import load_profile, measure_profile, print_profile, run_profile, write_profile
from foretoken.model.open import open_model
from foretoken.plan.profile import Curve, DrafterCost, Profile, fingerprint, profile_from_mapping

HAND = Profile(
    *({"name": "t"}, {"cpu": "c"}, {"torch": "2"}, "foretoken bench", "2026-11-21T00:00:00+00:00"),
    rows=Curve(((1, 1.0), (3, 2.0))),
    batch=Curve(((1, 1.0), (2, 4.0))),
    context=Curve(((10, 1.0), (20, 1.5))),
    chunk=Curve(((2, 1.0), (10, 3.0))),
    drafters={"ngram": DrafterCost(Curve(((1, 0.1), (4, 0.4))), Curve(((1, 0.2), (2, 0.3))), 4, Curve(((8, 0.01),)))},
    caveats=("busy",),
)


def test_between_before_and_beyond() -> None:
    curve = Curve(((2, 1.0), (4, 2.0), (8, 1.0)))
    assert [curve.seconds(n) for n in (1, 2, 3, 4, 6, 8, 100)] == [
        1.0,
        1.0,
        1.5,
        2.0,
        1.5,
        1.0,
        1.0,
    ]  # never down beyond the end
    assert Curve(((2, 1.0), (4, 2.0))).seconds(8) == 4.0
    assert Curve(((5, 3.0),)).seconds(50) == 3.0
    assert Curve().seconds(5) == 0.0
    assert curve.beyond(8, 4) == 0.0
    for points in (((4, 1.0), (2, 1.0)), ((1, -1.0),), ((1, math.inf),), ((1, 1.0), (1, 2.0))):
        with pytest.raises(ValueError, match="ascend"):
            Curve(points)


def test_a_step_by_hand() -> None:
    assert HAND.step_s(2, [10]) == 1.5
    assert HAND.step_s(3, [20]) == 2.0 + 0.5
    # Two requests of one row: 1.5 for two rows, 2.5 more for being two.
    assert HAND.step_s(2, [10, 10]) == 1.5 + 2.5
    assert HAND.step_s(0, [0], prompt_tokens=6) == 2.0
    assert HAND.step_s(2, [10], prompt_tokens=8) == 1.5 + (3.0 - 1.0)
    late = replace(
        HAND, chunk=Curve(((3, 1.0), (10, 3.0)))
    )  # up to where the chunk curve begins the curve of rows tells
    assert late.step_s(2, [10], prompt_tokens=8) == 1.5 + (2.0 - 1.5) + (3.0 - 1.0)
    assert late.step_s(1, [10], prompt_tokens=1) == 1.5
    cost = HAND.drafters["ngram"]
    assert cost.seconds(4) == pytest.approx(0.4)
    assert cost.seconds(4, batch=2) == pytest.approx(0.4 * 1.5)
    assert cost.seconds(4, prompt_tokens=9) == pytest.approx(0.41)
    assert cost.seconds(0) == cost.seconds(4, batch=0) == 0.0


def test_a_file_comes_back_and_keeps_its_predecessors(tmp_path: Path) -> None:
    first, second = write_profile(HAND, tmp_path / "new", "profile"), write_profile(HAND, tmp_path / "new", "profile")
    assert [path.name for path in (first, second)] == ["2026-11-21-profile.json", "2026-11-21-profile-2.json"]
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name])
    assert load_profile(second) == HAND
    assert json.loads(first.read_text())["fingerprint"] == HAND.fingerprint


def test_fingerprints_tell_machines_and_models_apart() -> None:
    base = fingerprint({"cpu": "a"}, {"name": "m"}, {"torch": "1"})
    assert base == fingerprint({"cpu": "a"}, {"name": "m"}, {"torch": "1"})
    others = [
        ({"cpu": "b"}, {"name": "m"}, {"torch": "1"}),
        ({"cpu": "a"}, {"name": "n"}, {"torch": "1"}),
        ({"cpu": "a"}, {"name": "m"}, {"torch": "2"}),
    ]
    assert len({base, *(fingerprint(*other) for other in others)}) == 4


def test_what_is_no_profile_is_refused_by_name(tmp_path: Path) -> None:
    good = HAND.as_dict()
    cases = [
        ({}, "not a profile of this version"),
        ([1], "not a profile of this version"),
        (good | {"format": "foretoken-profile-0"}, "foretoken-profile-0"),
        (good | {"rows": {"points": []}}, "profile.rows"),
        (good | {"rows": 7}, "profile.rows"),
        (good | {"context": {"points": [[2, 1], [1, 1]]}}, "profile.context"),
        (good | {"drafters": {"ngram": {"guesses": [["x", 1]]}}}, "profile.drafters.ngram.guesses"),
        (good | {"drafters": {"ngram": {"batch_num_draft": 0}}}, "profile.drafters.ngram.batch_num_draft"),
        (good | {"drafters": {"ngram": 3}}, "profile.drafters.ngram"),
        (good | {"drafters": 3}, "profile.drafters"),
        (good | {"machine": 3}, "profile.machine"),
        (good | {"caveats": 3}, "profile.caveats"),
        ({"format": good["format"]}, "profile.rows"),
    ]
    for raw, message in cases:
        with pytest.raises(InputError, match=message):
            profile_from_mapping(raw)
    with pytest.raises(StorageError, match="cannot read"):
        load_profile(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(StorageError, match="cannot read"):
        load_profile(tmp_path / "text.json")


def test_a_tiny_model_is_measured(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every curve has the points that fit into a context of 256 tokens, and everything is given back."""
    monkeypatch.setattr(profiling, "_POINT_S", 0.0)
    monkeypatch.setattr(module, "_BATCHES", (1, 4))
    heard: list[str] = []
    options = ProfileOptions(
        str(pair.target), str(pair.draft), parse_drafters(["draft_model", "ngram"]), budget_s=600.0
    )
    found = run_profile(options, "the command", tell=lambda words, share: heard.append(words))
    assert [count for count, _ in found.batch.points] == [1, 4]
    assert [count for count, _ in found.rows.points] == [1, 2, 4, 8, 16]  # 32 rows may need 385 tokens
    assert [count for count, _ in found.context.points] == [count for count, _ in found.chunk.points] == [32, 128]
    assert [count for count, _ in found.drafters["draft_model"].guesses.points] == [1, 2, 4, 8]
    assert [count for count, _ in found.drafters["ngram"].batch.points] == [1, 4, 8, 16]
    assert [count for count, _ in found.drafters["ngram"].prompt.points] == [32]
    assert all(
        seconds > 0 for curve in (found.rows, found.batch, found.chunk, found.context) for _, seconds in curve.points
    )
    assert (found.command, found.target["max_context_tokens"], found.target["block_tokens"]) == ("the command", 256, 32)
    assert profile_from_mapping(json.loads(json.dumps(found.as_dict()))) == found
    assert {"rows 16", "ngram batch 8", "context 128"} <= set(heard)
    print_profile(replace(found, caveats=("it was busy",)), Path("file.json"))
    out = capsys.readouterr().out
    assert "draft_model: draft tokens" in out
    assert "note: it was busy" in out
    assert "written: file.json" in out


def test_what_time_does_not_allow_is_left_out_and_said(pair: SimpleNamespace) -> None:
    """With no time at all the first point of each curve is measured, and the rest is named."""
    target = open_model(Path(pair.target), "auto", "cpu", 4096)
    found = measure_profile(target, {}, 1e-9, 0, {}, "")
    assert [len(curve.points) for curve in (found.rows, found.batch, found.context)] == [1, 1, 0]
    assert "rows 2" in found.caveats[0]
    assert "context 128" in found.caveats[0]
    small = open_model(Path(pair.target), "auto", "cpu", 256)
    caveat = measure_profile(small, {}, 1e9, 0, {}, "").caveats[0]
    assert "batch 16 at 32 tokens" in caveat


def test_medians_and_the_drafters_own_time(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 5, 1, 9, ... seconds count as their median; what the drafter spent is taken out of the step."""
    monkeypatch.setattr(profiling, "_POINT_S", 0.0)
    real, times = profiling.timed, iter([7.0] + [5.0, 1.0, 9.0] * 50)

    def fake(engine: object) -> tuple[float, float]:
        real(engine)
        return next(times), 0.5

    monkeypatch.setattr(profiling, "timed", fake)
    target = open_model(Path(pair.target), "auto", "cpu", 4096)
    bench = profiling.StepBench(target, 0, time.perf_counter() + 600, 600.0, lambda *_: None)
    found = bench.step_times("x", profiling.Work(1, 32, 2))
    assert (found.prompt_s, found.step_s, found.draft_s) == ((7.0,), (4.5, 0.5, 8.5), (0.5,) * 3)
    times = iter([7.0, 5.0, 1.0, 9.0])
    assert bench.curve("x", (3,), lambda rows: profiling.Work(1, 32, rows - 1)) == Curve(((3, 4.5),))


def test_a_prompt_that_was_timed_before_is_read_again(pair: SimpleNamespace) -> None:
    """Work of a longer past begins with the same tokens, and requests of a batch have the same ones."""
    target = open_model(Path(pair.target), "auto", "cpu", 4096)
    bench = profiling.StepBench(target, 0, time.perf_counter() + 600, 600.0, lambda *_: None)
    for work in (profiling.Work(1, 32, 0), profiling.Work(1, 32, 0), profiling.Work(3, 64, 0)):
        bench.step_times("x", work)
    assert target.prefix_stats.num_looked_up_tokens > 0
    assert target.prefix_stats.num_found_tokens == 0


def test_bad_options(pair: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="draft_model needs a draft"):
        run_profile(ProfileOptions(str(pair.target), drafters=parse_drafters(["draft_model"])))
