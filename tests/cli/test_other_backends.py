"""`foretoken eval --backend` and `foretoken audit --backend`: whole runs on servers, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SpecConfig
from foretoken.backend.answering import Answer, Drafting, Question
from foretoken.backend.http import HttpBackend
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.measure.asked import BackendSource
from foretoken.measure.eval.result import BACKEND_SCHEMA
from foretoken.server.api.app import create_app
from tests.cli.conftest import Run
from tests.measure.endpoint import Fake, Reply, serving, tokens
from tests.server.serving import served

TEXT = "def a():\n    return 1\n\n\ndef b():\n    return 1\n\n\ndef c():\n"
TARGET = "reference:target"
ADDRESS = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    spec = SpecConfig("ngram", num_draft=4)
    with (
        LLM(TARGET, spec, dtype="float32", profile="off", cache_tokens=8192) as llm,
        AsyncEngine(llm) as engine,
        served(create_app(LocalBackend(engine, "reference"))) as url,
    ):
        yield url


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"# {i}\n{TEXT}", "slice": "code"} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- eval


def drafted(_number: int, body: dict[str, Any]) -> Reply:
    """An answer that says what was drafted for it, as llama.cpp does; other texts get better drafts."""
    return tokens("a", "b", "c", timings={"draft_n": 8, "draft_n_accepted": 6 if "# 0" in body["prompt"] else 4})


def test_a_server_is_evaluated_and_compared(foretoken: Run, prompts: Path) -> None:
    with serving(Fake(drafted)) as fake:
        common = ["eval", "--backend", fake.url, "--prompts", prompts, "--max-tokens", 6]
        done = foretoken(*common, "--out", "a.json")
        assert done.code == 0, done.err
        assert "not reported" in done.out
        again = foretoken(*common, "--against", "a.json", "--json", "--model", "other")
        fake.answer = lambda _number, _body: tokens("a", timings={"draft_n": 8, "draft_n_accepted": 1})
        worse = foretoken(*common, "--against", "a.json")
    found = json.loads(Path("a.json").read_text())
    assert (found["schema"], found["complete"], len(found["answers"])) == (BACKEND_SCHEMA, True, 6)
    assert found["identity"] == {"backend": {"name": fake.url, "version": "someone", "model": "fake"}}
    assert (found["rows"][0]["drafter"], found["rows"][0]["num_drafted"], found["rows"][0]["positions"]) == (
        "served",
        48,
        None,
    )
    assert again.code == 0, again.err
    compared = json.loads(again.lines[-1])["comparison"]
    assert [one["outcome"] for one in compared["cells"]] == ["kept"]
    assert compared["changed"] == ["backend: model (fake -> other)"]
    assert worse.code == 5
    assert "acceptance fell: served on code at temperature 0" in worse.err
    assert fake.asked[0][2]["ignore_eos"] is True


def test_a_server_that_reports_nothing_is_refused(foretoken: Run, prompts: Path) -> None:
    with serving(Fake()) as fake:
        done = foretoken("eval", "--backend", fake.url, "--prompts", prompts)
    assert (done.code, done.out, len(fake.asked)) == (2, "", 1)
    assert "reports no drafted and accepted tokens; acceptance cannot be measured" in done.err


def test_an_engine_in_this_process_is_evaluated(foretoken: Run, prompts: Path) -> None:
    common = ["eval", "--backend", "local", "-t", TARGET, "--prompts", prompts, "--max-tokens", 12]
    done = foretoken(*common, "--drafters", "ngram", "--num-draft", 3, "--dtype", "float32", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.lines[-1])["rows"]
    assert [(row["drafter"], row["temperature"]) for row in rows] == [("ngram-3", 0.0), ("ngram-3", 0.8)]
    assert [one["position"] for one in rows[0]["positions"]] == [1, 2, 3]
    ours = foretoken(*common[:1], *common[3:], "--drafters", "ngram", "--num-draft", 3, "--dtype", "float32", "--json")
    (own, *_) = json.loads(ours.lines[-1])["rows"]
    same = ("num_drafted", "num_accepted", "num_rounds", "num_emitted", "acceptance_rate", "emitted_per_step")
    assert [rows[0][name] for name in same] == [own[name] for name in same]


# ---- audit


SHORT = ["--num-prompts", 6, "--max-tokens", 24, "--num-seeds", 24]


def test_a_server_is_audited(foretoken: Run, address: str, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["audit", "--backend", address, "--prompts", prompts, *SHORT, "-t", TARGET, "--dtype", "float32"]
    done = foretoken(*common, "--out", "report.md")
    assert done.code == 0, done.out + done.err
    page = Path("report.md").read_text()
    assert page.startswith("# PASS: ")
    assert "| not asked | all cache is released |  |  | a backend does not show its cache |" in page
    answer = HttpBackend.answer

    def other(self: HttpBackend, question: Question, drafting: Drafting) -> Answer:
        found = answer(self, question, drafting)
        ids = (*found.token_ids[:-1], 5 if found.token_ids[-1] != 5 else 6)
        return replace(found, token_ids=ids) if drafting.kind is not None else found

    monkeypatch.setattr(HttpBackend, "answer", other)
    broken = foretoken(*common, "--temperatures", "0", "--json")
    assert (broken.code, json.loads(broken.lines[-1])["passed"]) == (5, False)
    assert "audit failed: the same answers as plain decoding (temperature 0, served)" in broken.err


def test_without_a_target_the_rest_is_not_asked(foretoken: Run, address: str, prompts: Path) -> None:
    short = ["--num-prompts", 4, "--max-tokens", 12]
    done = foretoken("audit", "--backend", address, "--prompts", prompts, *short, "--json")
    assert done.code == 0, done.err
    checks = json.loads(done.lines[-1])["checks"]
    unasked = {one["name"] for one in checks if one["result"] == "not asked"}
    assert {"every token is the target's choice", "distribution", "distribution of first tokens"} <= unasked
    asked = {one["name"] for one in checks if one["result"] == "pass"}
    assert asked == {"the same answers as plain decoding", "the same answer again", "equal seeds, equal answers"}


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--rule", "block"], "rule='block': is chosen by http://127.0.0.1:9 itself"),
        (["eval", "--num-draft", 3], "num_draft=3: http://127.0.0.1:9 was started with its own"),
        (["eval", "--draft", "d"], "draft='d': http://127.0.0.1:9 was started with its own"),
        (["eval", "--target", "t"], "target='t': http://127.0.0.1:9 serves its own model, see --model"),
        (["eval", "--max-tokens", 1], "max_tokens=1: must be at least 2"),
        (["audit", "--rule", "block"], "rule='block': is chosen by"),
        (["audit", "--numerics", "strict"], "numerics='strict': is chosen by"),
        (["audit", "--drafter", "ngram"], "drafter='ngram': http://127.0.0.1:9 was started with its own"),
        (["audit", "--dtype", "float32"], "dtype='float32': is of a target that judges the answers"),
        (["audit", "--num-seeds", 0, "-t", TARGET], "num_seeds=0: must be at least 1"),
        (["audit", "--temperatures", ""], "temperatures='': name at least one"),
        (["audit", "--against-backend", "odd"], "against_backend='odd': choose from"),
    ],
)
def test_options_that_an_address_does_not_take(
    foretoken: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    monkeypatch.setattr(BackendSource, "open", None)
    done = foretoken(*arguments, "--backend", ADDRESS, "--prompts", prompts)
    assert (done.code, done.out) == (2, ""), done.err
    assert message in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--model", "m"], "model='m': names the model at the address of a --backend"),
        (["audit", "--model", "m"], "model='m': goes with --backend"),
        (["audit", "--against-backend", ADDRESS], "goes with --backend"),
        (["audit", "--num-seeds", 9], "num_seeds=9: goes with --backend"),
        (["eval", "--backend", "odd"], " backend='odd': choose from local, "),
        (["eval", "--backend", "local", "--model", "m"], "names the model at an address"),
        (["eval", "--backend", "local", "--drafters", "odd"], "local drafts otherwise; choose from"),
    ],
)
def test_options_without_effect(foretoken: Run, prompts: Path, arguments: list[object], message: str) -> None:
    done = foretoken(*arguments, "-t", TARGET, "--prompts", prompts)
    assert (done.code, done.out) == (2, ""), done.err
    assert message in done.err


@pytest.mark.parametrize("verb", ["eval", "audit"])
def test_a_server_that_does_not_run(foretoken: Run, prompts: Path, verb: str) -> None:
    done = foretoken(verb, "--backend", ADDRESS, "--prompts", prompts)
    assert (done.code, done.out, "Traceback" in done.err) == (1, "", False)
    assert "gave no model" in done.err
