"""Answers of the code before the controller was redesigned (commit 4eceda7), token for token.

float64: two processors round differently there too, but no two logits of these answers are that close.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams, SpecConfig

OLD: dict[str, Any] = json.loads(Path(__file__).with_name("old_answers.json").read_text())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("reference:target", dtype="float64", profile="off") as llm:
        yield llm


@pytest.mark.filterwarnings("ignore::foretoken.errors.SpeculationWarning")  # a draft model for short answers
@pytest.mark.parametrize("name", OLD["cases"])
def test_greedy_and_seeded_answers_are_those_of_the_code_before(llm: LLM, name: str) -> None:
    case = OLD["cases"][name]
    params = SamplingParams(max_tokens=24, ignore_eos=True, **case["params"])
    answers = llm.generate(OLD["prompts"], params, SpecConfig(**case["spec"]))
    assert [list(answer.token_ids) for answer in answers] == case["answers"]
