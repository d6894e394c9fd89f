"""Answers on disk as they come: a run that was stopped goes on, and only with the same options."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.errors import InputError, StorageError
from foretoken.measure.load.options import LoadOptions
from foretoken.measure.load.run import kept_turns
from foretoken.measure.load.settings import parse_batch_settings
from foretoken.measure.progress import progress
from foretoken.measure.speed import run as offline
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import SpeedSample, SpeedSetting
from foretoken.measure.speed.run import SAMPLES_SUFFIX, run_speed
from foretoken.measure.speed.turns import Samples
from foretoken.printing.console import Console
from tests.helpers.tiny_heads import tiny_head
from tests.measure.fakes import FakeLLM, answer

OPTIONS = SpeedOptions(
    "t", drafters=("ngram",), num_drafts=(3,), slices=("code",), max_tokens=12, repeats=2, temperatures=(0.0,), warmup=0
)


class Stopped(FakeLLM):
    """Interrupted after so many answers."""

    most = 3

    def generate(self, prompts, params, **others):
        if len(self.calls) >= self.most:
            raise KeyboardInterrupt
        return super().generate(prompts, params, **others)


def test_a_stopped_run_keeps_what_it_has_and_goes_on_from_there(tmp_path: Path) -> None:
    options = replace(OPTIONS, resume=tmp_path / "kept.jsonl")
    stopped = run_speed(options, Stopped())
    assert stopped.interrupted
    assert stopped.results["num_answers"] == 3
    assert any("after 3 of 8 answers" in caveat and "--resume" in caveat for caveat in stopped.caveats)
    later = FakeLLM()
    done = run_speed(options, later)
    assert not done.interrupted
    assert len(later.calls) == 5
    whole = run_speed(OPTIONS, FakeLLM())
    counted = ("setting", "slice", "num_prompts", "repeats", "num_emitted", "num_accepted", "num_compared")
    assert [[getattr(row, name) for name in counted] for row in done.rows] == [
        [getattr(row, name) for name in counted] for row in whole.rows
    ]
    again = FakeLLM()
    run_speed(options, again)
    assert not again.calls


def test_an_answer_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    options = replace(OPTIONS, resume=path)
    run_speed(options, Stopped())
    path.write_bytes(path.read_bytes()[:-9])
    llm = FakeLLM()
    run_speed(options, llm)
    assert len(llm.calls) == 6
    assert len(path.read_text(encoding="utf-8").splitlines()) == 1 + 8


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"max_tokens": 13}, "max_tokens"), ({"num_drafts": (4,)}, "num_drafts"), ({"seed": 1}, "seed")],
)
def test_other_options_are_refused_by_name(tmp_path: Path, changed: dict[str, object], field: str) -> None:
    options = replace(OPTIONS, resume=tmp_path / "kept.jsonl")
    run_speed(options, Stopped())
    with pytest.raises(InputError, match=f"resume=.*{field}"):
        run_speed(replace(options, **changed), FakeLLM())
    run_speed(replace(options, name="another"), FakeLLM())  # no answer depends on it


def test_a_head_that_only_a_drafter_names_must_have_the_same_files(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    head = tiny_head(tmp_path / "head", text_pair.target, "medusa")
    target, kept = str(text_pair.target), tmp_path / "kept.jsonl"
    speed = replace(OPTIONS, target=target, drafters=(f"medusa:head={head}",))
    load = LoadOptions(target, settings=(f"medusa:head={head}-2",), resume=kept)
    settings, _ = parse_batch_settings(load.settings, None)

    def about() -> object:
        return offline._about(speed, (), {}, given=False)

    before = about()
    for _ in range(2):
        kept_turns(load, {}, settings).close()
    config = head / "config.json"
    config.write_text(config.read_text() + " ")
    assert about() != before
    with pytest.raises(InputError, match=f"was measured with files of {head}="):
        kept_turns(load, {}, settings)


def test_a_corpus_that_only_a_drafter_names_must_hold_the_same(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    corpus, target = tmp_path / "corpus.txt", str(text_pair.target)
    corpus.write_text("one")
    speed = replace(OPTIONS, target=target, drafters=(f"suffix:corpus={corpus}",))
    load = LoadOptions(target, settings=(f"suffix:corpus={corpus}-2",), resume=tmp_path / "kept.jsonl")
    settings, _ = parse_batch_settings(load.settings, None)
    before = offline._about(speed, (), {}, given=False)
    kept_turns(load, {}, settings).close()
    corpus.write_text("two")
    assert offline._about(speed, (), {}, given=False) != before
    with pytest.raises(InputError, match=f"was measured with content of {corpus}="):
        kept_turns(load, {}, settings)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"prompt": "one"}, {"prompt": "two"}),
        ({"prompt": "one", "prediction": "a"}, {"prompt": "one", "prediction": "b"}),
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}),
    ],
)
def test_other_prompts_are_refused(tmp_path: Path, before: dict[str, object], after: dict[str, object]) -> None:
    prompts = tmp_path / "mine.jsonl"
    options = replace(OPTIONS, resume=tmp_path / "kept.jsonl", prompts=prompts, slices=("all",))
    prompts.write_text(json.dumps(before) + "\n", encoding="utf-8")
    run_speed(options, Stopped())
    prompts.write_text(json.dumps(after) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="what the prompts ask"):
        run_speed(options, FakeLLM())


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    Samples(path, {}, {}).close()
    content = path.read_text(encoding="utf-8") + '{"setting": "plain"}\n'
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StorageError, match="does not hold the measurements"):
        Samples(path, {}, {"plain": SpeedSetting("plain")})
    assert path.read_text(encoding="utf-8") == content


def test_an_answer_comes_back_as_it_was(tmp_path: Path) -> None:
    setting = SpeedSetting("ngram-3", drafter="ngram", num_draft=3)
    own = answer(4, 0.5, positions=((2, 1), (1, 0)), num_steps=3, ttft_s=0.25)
    sample = SpeedSample(setting, 1, "code", 0.0, 2, own, 0.5)
    first = Samples(tmp_path / "a.jsonl", {"x": (1, 2)}, {setting.name: setting})
    first.add(sample)
    first.close()
    again = Samples(tmp_path / "a.jsonl", {"x": [1, 2]}, {setting.name: setting})
    again.close()
    assert again.all == [sample]
    assert ("ngram-3", 1, 0.0, 2) in again


def test_answers_stand_beside_a_dated_result(tmp_path: Path) -> None:
    report = run_speed(replace(OPTIONS, out=tmp_path), FakeLLM())
    (samples,) = (path for path in tmp_path.iterdir() if path.name.endswith(SAMPLES_SUFFIX))
    assert str(samples) in report.files
    assert len(samples.read_text(encoding="utf-8").splitlines()) == 1 + report.results["num_answers"]
    run_speed(replace(OPTIONS, out=tmp_path), FakeLLM())  # a second run of the day has files of its own
    assert len([path for path in tmp_path.iterdir() if path.name.endswith(SAMPLES_SUFFIX)]) == 2


def test_others_on_the_cores_mark_the_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Busy:
        def start(self) -> None: ...
        def share(self) -> float:
            return 0.4

    monkeypatch.setattr(offline, "OtherLoad", Busy)
    report = run_speed(OPTIONS, FakeLLM())
    assert {row.num_contended for row in report.rows} == {4}
    assert "4 of 4" in report.tables[0].lines[0]
    assert any("during 8 of 8 answers" in caveat for caveat in report.caveats)
    assert capsys.readouterr().err.count("other processes take 40% of the cores") == 1
    assert json.loads(report.json_line())["rows"][0]["num_contended"] == 4


def test_a_log_shows_a_line_now_and_then() -> None:
    times = iter(range(0, 1000, 20))
    out = io.StringIO()
    with progress(5, Console(file=out), clock=lambda: next(times), every_s=30.0) as tell:
        for place in range(5):
            tell(f"setting {place}")
    assert out.getvalue().splitlines() == [
        "measured 1 of 5, about 3 min left; next: setting 1",
        "measured 3 of 5, about 1 min left; next: setting 3",
    ]
