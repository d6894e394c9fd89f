"""The rules of the field: each is a finding where the user's own numbers break it, and nothing where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.measure.advise.cells import MemoryRoom
from foretoken.measure.advise.costs import LoadCosts
from foretoken.measure.advise.memory import MemoryRow, memory_advice
from foretoken.measure.advise.options import AdviseOptions
from foretoken.measure.advise.run import cut_notes, recorded_notes
from foretoken.measure.advise.verdict import Finding, of_pair, of_question
from foretoken.measure.eval.prompts import prompts_of
from foretoken.plan.memory import Budget
from foretoken.plan.profile import Curve
from foretoken.text.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tiny_tokenizer

# A plain step takes 10 ms, a prompt of 4,096 tokens 1.2 s.
COSTS = LoadCosts(4096, 4096, 1.2, {1: Curve(((0, 0.01), (10, 0.02)))})
TEMPLATE = "{{ messages[0]['content'] }}"


def found(topic: str, findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.topic == topic]


@pytest.mark.parametrize(
    ("topic", "breaks", "keeps"),
    [
        ("temperature", {"temperature": 1.2}, {"temperature": 1.0}),
        ("short answer", {"max_tokens": 99}, {"max_tokens": 100}),
        ("prompt length", {"max_tokens": 280}, {"max_tokens": 281}),  # 1.2 s of 4 s, and less
    ],
)
def test_the_question_itself(topic: str, breaks: dict[str, Any], keeps: dict[str, Any]) -> None:
    (one,) = found(topic, of_question(AdviseOptions("t", **breaks), COSTS))
    assert one.candidate == ""
    assert not one.rules_out
    assert not found(topic, of_question(AdviseOptions("t", **keeps), COSTS))


def test_prompts_as_long_as_those_of_retrieval_are_called_so() -> None:
    (one,) = found("prompt length", of_question(AdviseOptions("t"), COSTS))
    assert "prompts of 4,096 tokens (as long as those of retrieval) takes 48% of the time" in one.finding
    (short,) = found("prompt length", of_question(AdviseOptions("t"), replace(COSTS, prompt_tokens=500)))
    assert "retrieval" not in short.finding


@pytest.mark.parametrize(
    ("draft_bytes", "says"), [(100, None), (334, "only 3.0 times smaller"), (1000, "as much as the target")]
)
def test_the_size_of_a_draft(draft_bytes: int, says: str | None) -> None:
    target, draft = SimpleNamespace(step_bytes=1000), SimpleNamespace(step_bytes=draft_bytes)
    findings = of_pair("d", "d", target, draft, (None, None))
    assert [one.rules_out for one in findings] == [True] * (says is not None)
    assert says is None or says in findings[0].finding


def test_tokenizer_and_chat_template_of_a_draft(tmp_path: Path) -> None:
    texts = {
        "target": {"chat_template": TEMPLATE},
        "same": {"chat_template": TEMPLATE},
        "template": {"chat_template": TEMPLATE + "!"},
        "tokenizer": {"texts": ("other words for other merges " * 20,)},
    }
    made = {name: load_tokenizer(tiny_tokenizer(tmp_path / name, 300, **own)) for name, own in texts.items()}
    target, draft = SimpleNamespace(step_bytes=1000), SimpleNamespace(step_bytes=10)

    def of(name: str) -> list[Finding]:
        return of_pair("d", "d", target, draft, (made["target"], made[name]))

    assert of("same") == []
    assert [(one.topic, one.rules_out) for one in of("template")] == [("draft text", False)]
    assert "another chat template" in of("template")[0].finding
    assert [(one.topic, one.rules_out) for one in of("tokenizer")] == [("tokenizer", True)]


def test_memory_that_stays_free() -> None:
    row = MemoryRow("d", 10, 10, 860, 840, 5, 0.14, MemoryRoom(8, 7))
    advice = memory_advice(row, Budget(1000, 0.2))
    assert advice is not None
    assert "leaves 14% in reserve where 15% to 20% are usual" in advice.finding
    assert memory_advice(replace(row, total_bytes=850), Budget(1000, 0.2)) is None


def test_numbers_of_draft_tokens_are_swept_from_1_to_10() -> None:
    assert AdviseOptions("t").lengths == tuple(range(1, 11))


def test_requests_that_ask_otherwise_than_the_advice_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [{"prompt": "a", "max_tokens": count, "temperature": 0.7} for count in (16, 20, 400)]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = prompts_of(path, ["all"], 9)
    length, temperature = recorded_notes(AdviseOptions("t"), prompts)
    assert "ask for 16 to 400 tokens, and the advice is for answers of 128: --max-tokens 20" in length
    assert "a temperature of 0.7, and the advice is for 0: --temperature 0.7" in temperature
    assert recorded_notes(AdviseOptions("t", max_tokens=20, temperature=0.7), prompts) == []


def test_answers_that_end_with_the_context_are_named() -> None:
    options = AdviseOptions("t", max_tokens=100)
    assert cut_notes(options, [10, 28], 128) == []
    (note,) = cut_notes(options, [10, 29], 128)
    assert "1 of 2 answers end before 100 tokens: the target's context of 128" in note
