"""`foretoken advise` and `diagnose` that are interrupted: what was measured is reported, kept, not measured again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from foretoken.measure.advise import run as advise_module
from foretoken.measure.diagnose import run as diagnose_module
from tests.cli.conftest import Run
from tests.helpers.checkpoints import token_ids


@pytest.fixture
def words(pair: SimpleNamespace, tmp_path: Path) -> list[object]:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": token_ids(6, seed=number), "slice": "xy"[number % 2]} for number in range(4)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return ["--target", pair.target, "--prompts", prompts, "--max-tokens", 8, "--json"]


def interrupted_at(monkeypatch: pytest.MonkeyPatch, module: ModuleType, count: int) -> Callable[[], int]:
    """Ctrl-C comes at the call number `count` of `module.measure`; returns the number of calls so far."""
    measure, calls = module.measure, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise KeyboardInterrupt
        return measure(*args, **options)

    monkeypatch.setattr(module, "measure", counted)
    return lambda: calls


def report_of(done: Any) -> dict[str, Any]:
    found = json.loads(done.lines[-1])
    assert isinstance(found, dict)
    return found


def test_an_interrupted_advice_goes_on(
    foretoken: Run, pair: SimpleNamespace, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = ["--concurrency", "1,2", "--num-drafts", "1,2", "--budget-s", 1]
    command = ["advise", "--drafts", f"suffix,{pair.draft}", *words, *costs]

    def emitted(done: Any) -> dict[tuple[Any, ...], Any]:
        keys = ("candidate", "slice", "concurrency", "num_draft")
        return {tuple(row[key] for key in keys): row["emitted_per_step"] for row in report_of(done)["sweep"]}

    whole = foretoken(*command)
    with monkeypatch.context() as patched:
        interrupted_at(patched, advise_module, 2)
        done = foretoken(*command, "--resume", "none.jsonl")
        assert (done.code, done.out) == (130, "")  # a drafter without an answer
    with monkeypatch.context() as patched:
        interrupted_at(patched, advise_module, 6)
        done = foretoken(*command, "--resume", "kept.jsonl", "--out", "part.json")
    assert (done.code, "Traceback" in done.err) == (130, False)
    assert report_of(done)["interrupted"]
    assert any("--resume kept.jsonl" in caveat for caveat in report_of(done)["caveats"])
    assert json.loads(Path("part.json").read_text())["interrupted"]
    calls = interrupted_at(monkeypatch, advise_module, 99)
    done = foretoken(*command, "--resume", "kept.jsonl")
    assert (done.code, calls()) == (0, 8 - 5)
    assert emitted(done) == emitted(whole)
    other = foretoken(*command, "--resume", "kept.jsonl", "--seed", 1)
    assert (other.code, "was measured with seed=0, this run has 1" in other.err) == (2, True)


def test_an_interrupted_diagnosis_goes_on(
    foretoken: Run, pair: SimpleNamespace, words: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["diagnose", "--draft", pair.draft, *words, "--num-prompts", 4, "--temperature", 0.8]
    whole = report_of(foretoken(*command))
    assert len(whole["rows"]) > 2
    with monkeypatch.context() as patched:
        interrupted_at(patched, diagnose_module, 3)
        done = foretoken(*command, "--resume", "kept.jsonl", "--out", "part.json")
    assert (done.code, "Traceback" in done.err) == (130, False)
    part = report_of(done)
    assert part["verdict"] == "No verdict: the run was interrupted; of 1 repairs that were tried none helps."
    assert (part["interrupted"], part["cause"]) == (True, None)
    assert [row["accepted_per_draft"] for row in part["rows"]] == [
        row["accepted_per_draft"] for row in whole["rows"][:2]
    ]
    assert json.loads(Path("part.json").read_text())["interrupted"]
    calls = interrupted_at(monkeypatch, diagnose_module, 99)
    resumed = report_of(foretoken(*command, "--resume", "kept.jsonl"))
    assert calls() == len(whole["rows"]) - 2
    assert resumed["rows"] == whole["rows"]


def test_a_model_that_was_written_anew_is_another_one(
    foretoken: Run, pair: SimpleNamespace, words: list[object]
) -> None:
    draft = Path(shutil.copytree(pair.draft, "draft"))
    command = ["diagnose", "--draft", "draft", *words, "--num-prompts", 4, "--resume", "kept.jsonl"]
    assert foretoken(*command).code == 0
    (draft / "config.json").write_text((draft / "config.json").read_text() + " ")
    done = foretoken(*command)
    assert (done.code, "was measured with files of draft=" in done.err) == (2, True)


@pytest.mark.parametrize(
    "command",
    [
        ["advise", "--drafts", "suffix:corpus=corpus.txt", "--budget-s", 1, "--concurrency", 1, "--num-drafts", 1],
        ["eval", "--drafters", "suffix:corpus=corpus.txt", "--num-draft", 2, "--temperatures", 0],
        ["audit", "--corpus", "corpus.txt", "--num-prompts", 1, "--temperatures", 0],
    ],
    ids=lambda command: command[0],
)
def test_a_corpus_that_was_written_anew_is_another_one(
    foretoken: Run, text_pair: SimpleNamespace, command: list[object]
) -> None:
    Path("corpus.txt").write_text("one two three")
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "one two", "slice": "x"}) + "\n")
    words = ["--target", text_pair.target, "--prompts", "prompts.jsonl", "--max-tokens", 4, "--resume", "kept.jsonl"]
    first = foretoken(*command, *words)
    assert first.code in (0, 1), first.err
    Path("corpus.txt").write_text("four")
    done = foretoken(*command, *words)
    assert (done.code, "was measured with content of corpus.txt=" in done.err) == (2, True), done.err
