"""`foretoken demo`: the same texts with and without drafting, end to end, and a summary in plain words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.cli import demo
from foretoken.cli.demo import FREE_STANDING, busy_line, plain_words, summary
from foretoken.cli.demo_run import PROMPTS, DemoAnswer, DemoPrompt, DemoRun, total_of
from foretoken.config import PLAIN, SpecConfig
from foretoken.engine.llm import LLM
from foretoken.machine.neighbours import Neighbour
from tests.cli.conftest import Run

CHAT, CODE = DemoPrompt("chat", "a", "A?"), DemoPrompt("code", "b", "B?")
ANSWERS = [
    DemoAnswer(CHAT, PLAIN, "x", (1, 2, 3, 4), 2.0, 4, 0, 0),
    DemoAnswer(CHAT, "auto", "x", (1, 2, 3, 4), 1.0, 2, 3, 2),
    DemoAnswer(CODE, PLAIN, "y", (5, 6), 1.0, 2, 0, 0),
    DemoAnswer(CODE, "auto", "y", (5, 6), 0.25, 1, 1, 1),
]


def test_prompts_are_of_three_kinds() -> None:
    assert list(dict.fromkeys(prompt.kind for prompt in PROMPTS)) == ["chat", "code", "edit"]
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS) == 9


def test_the_summary_is_end_to_end() -> None:
    found = summary(ANSWERS, [PLAIN, "auto"], 0.5)
    assert found["identical"] is True
    assert found["plain"]["tokens_per_s"] == 2.0
    assert found["speculative"]["tokens_per_s"] == pytest.approx(6 / 1.25)
    assert found["speedup"] == pytest.approx(2.4)
    assert found["speculative"]["kinds"]["code"]["tokens_per_s"] == 8.0
    assert found["others_cores"] == 0.5
    assert json.loads(json.dumps(found)) == found
    other = [*ANSWERS[:-1], replace(ANSWERS[-1], token_ids=(5, 7))]
    assert summary(other, [PLAIN, "auto"], None)["identical"] is False


def test_plain_words() -> None:
    assert plain_words(ANSWERS, [PLAIN, "auto"]) == [
        "All 2 answers are the same, token for token.",
        "Plain decoding took 3.0 s, auto 1.2 s, from the request to the last token, prompt included: "
        "2.40x (chat 2.00x, code 4.00x).",
        "auto drafted 4 tokens, and the model accepted 3: 2.00 tokens for each of its steps instead of 1.",
    ]
    other = [*ANSWERS[:-1], replace(ANSWERS[-1], token_ids=(5, 7), num_drafted=0)]
    assert plain_words(other, [PLAIN, "auto"])[0] == "auto: 1 of 2 answers differ from plain decoding."
    none = [replace(answer, num_drafted=0) for answer in ANSWERS]
    assert plain_words(none, [PLAIN, "auto"])[-1] == "auto drafted nothing: no draft was worth its cost here."
    assert total_of(none, PLAIN, "code").num_tokens == 2


@pytest.mark.parametrize("drafter", ["suffix", "recycling"])
def test_w6_a_repeated_prompt_drafts_nothing_from_its_earlier_answer(drafter: str) -> None:
    specs = {PLAIN: SpecConfig(), drafter: SpecConfig(drafter, num_draft=4)}
    with LLM("reference:target", specs[drafter], dtype="float32", profile="off") as llm:
        run = DemoRun(llm, specs, 16)
        first, again = (list(run.answers(PROMPTS[-1:], lambda *_: None)) for _ in range(2))
    assert [one.num_accepted for one in first] == [one.num_accepted for one in again]
    assert [one.setting for one in first] == [PLAIN, drafter]


def test_every_other_prompt_begins_with_the_last_setting() -> None:
    specs = {PLAIN: SpecConfig(), "ngram": SpecConfig("ngram")}
    with LLM("reference:draft", specs[PLAIN], dtype="float32", profile="off") as llm:
        found = [one.setting for one in DemoRun(llm, specs, 2).answers(PROMPTS[:2], lambda *_: None)]
    assert found == [PLAIN, "ngram", "ngram", PLAIN]


def test_c8_a_busy_machine_is_named() -> None:
    line = busy_line(1.2, 2, [Neighbour(7, "make", 0.9), Neighbour(8, "cc1plus", 0.3)])
    assert line.startswith("Meanwhile other processes took 1.2 of 2 cores (now: make 0.9, cc1plus 0.3).")
    assert "`foretoken doctor`" in line
    assert "(now" not in busy_line(1.2, 2, None)


@pytest.mark.parametrize("others", [0.0, 1.5, None])
def test_c8_the_demo_says_who_else_computes(
    foretoken: Run, monkeypatch: pytest.MonkeyPatch, others: float | None
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", PROMPTS[:2])
    monkeypatch.setattr(demo.OtherLoad, "cores", lambda self: others)
    monkeypatch.setattr(demo, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(demo, "neighbours", lambda: [Neighbour(7, "make", 0.9)])
    done = foretoken("demo", "--max-tokens", 3, "--drafter", "ngram")
    assert done.code == 0, done.err
    assert ("make 0.9" in done.out) == bool(others)
    assert "All 2 answers are the same" in done.out
    assert f"smollm2 is asked: {PROMPTS[0].text}" in done.lines[0]
    assert "warning" not in done.err


def test_every_drafter_that_needs_nothing_is_a_row(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", PROMPTS[:1])
    done = foretoken("demo", "--all", "--max-tokens", 3, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    assert list(found["settings"]) == [PLAIN, *FREE_STANDING]
    assert {"ngram", "suffix", "recycling", "lookahead", "early_exit", "mix", "auto"} == set(FREE_STANDING)
    assert found["drafter"] in FREE_STANDING
    assert found["identical"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--all", "--drafter", "ngram"), "leave --drafter out"),
        (("--drafter", "eagle"), "choose one of"),
        (("--max-tokens", 1), "must be at least 2"),
    ],
)
def test_what_cannot_be_shown_is_refused(foretoken: Run, arguments: tuple[object, ...], words: str) -> None:
    done = foretoken("demo", *arguments)
    assert done.code == 2
    assert words in done.err


def test_the_real_model_answers_the_same(smollm2_file: Path, foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", PROMPTS[::3])  # one of each kind
    done = foretoken("demo", "--max-tokens", 24, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    assert found["identical"] is True
    assert min(found["speedup"], found["plain"]["tokens_per_s"], found["speculative"]["tokens_per_s"]) > 0
    assert "blue" in found["answers"][0]["text"]
    assert "the meeting" in found["answers"][-1]["text"]
