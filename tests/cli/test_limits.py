"""Limits and rules of the engine as flags of `foretoken generate`."""

from __future__ import annotations

import json
import re

import pytest

from foretoken import SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine.llm import LLM
from foretoken.engine_config import EngineConfig
from tests.cli.conftest import Run

PROMPT = (
    "generate",
    "--prompt",
    "a = 1\nb = 1\na = 1\nb = 1\na = 1\n",
    "--max-tokens",
    "16",
    "--ignore-eos",
    "--cost-profile",
    "off",
    "--dtype",
    "float32",
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SchedulerConfig, RoutingRules, LLM]]:
    """The limits and rules of every engine that was opened."""
    found: list[tuple[SchedulerConfig, RoutingRules, LLM]] = []

    class Noted(LLM):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            found.append((self.engine.scheduler.config, self.engine.chooser.routing.rules, self))

    monkeypatch.setattr("foretoken.engine.llm.LLM", Noted)
    return found


def test_without_flags_they_are_the_engines_own(foretoken: Run, opened: list) -> None:
    assert foretoken(*PROMPT, "--drafter", "ngram").code == 0
    assert opened[0][:2] == (EngineConfig("m").scheduler, RoutingRules())
    assert opened[0][0] == SchedulerConfig(cache_reserve=0.15)


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        ((), SpecConfig("auto")),
        (("--num-draft", 3), SpecConfig("auto", num_draft=3)),
        (("--rule", "greedy"), SpecConfig("auto", rule="greedy")),
        (("--drafter", "none"), SpecConfig()),
        (("--draft", "reference:draft"), SpecConfig("draft_model", "reference:draft")),
        (("--prediction", "a = 1"), SpecConfig("predicted")),
    ],
)
def test_it_drafts_unless_told_otherwise(
    foretoken: Run, opened: list, flags: tuple[object, ...], spec: SpecConfig
) -> None:
    done = foretoken(*PROMPT, *flags)
    assert (done.code, opened[0][2].spec) == (0, spec), done.err


def test_every_flag_arrives(foretoken: Run, opened: list) -> None:
    """And the answers are those of an engine without limits."""
    limits = (
        "--max-batch-size",
        2,
        "--max-prompt-tokens",
        7,
        "--max-step-tokens",
        12,
        "--cache-reserve",
        0.25,
        "--cache-tokens",
        256,
    )
    rules = ("--min-tokens-to-speculate", 4, "--min-tokens-for-draft-model", 3, "--max-speculating-requests", 1)
    own = ("--drafter", "ngram", "--n", 3, "--temperature", 1, "--seed", 3, "--rule", "coupled", "--json")
    wide, narrow = foretoken(*PROMPT, *own), foretoken(*PROMPT, *own, *limits, *rules)
    assert wide.code == narrow.code == 0
    assert opened[1][:2] == (
        SchedulerConfig(2, 7, max_step_tokens=12, cache_reserve=0.25),
        RoutingRules(min_tokens_to_speculate=4, min_tokens_for_draft_model=3, max_speculating_requests=1),
    )
    answers = [json.loads(done.lines[-1]) for done in (wide, narrow)]
    texts = [[one["token_ids"] for one in (answer, *answer["others"])] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("least", "drafts"), [(16, True), (17, False)])
def test_nothing_is_drafted_for_a_short_answer(foretoken: Run, least: int, drafts: bool) -> None:
    done = foretoken(*PROMPT, "--drafter", "ngram", "--min-tokens-to-speculate", least, "--json")
    assert (json.loads(done.lines[-1])["stats"]["num_drafted"] > 0) == drafts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-batch-size", 0), "max_batch_size=0: must be a whole number of at least 1"),
        (("--max-prompt-tokens", 0), "max_prompt_tokens=0: must be a whole number of at least 1"),
        (("--max-step-tokens", 16), "max_step_tokens=16: must be more than max_batch_size, 16"),
        (("--cache-reserve", 1.5), "cache_reserve=1.5: must be a number from 0 to 1"),
        (("--drafter", "ngram", "--min-tokens-to-speculate", -1), "min_tokens_to_speculate=-1: must be at least 0"),
        (("--drafter", "ngram", "--max-speculating-requests", -1), "max_speculating_requests=-1: must be at least 0"),
        (
            ("--drafter", "none", "--max-speculating-requests", 2),
            "max_speculating_requests=2: .* there is no drafter: name a --drafter other than none",
        ),
        (
            ("--drafter", "ngram", "--num-draft", 2, "--min-tokens-to-speculate", 2),
            "min_tokens_to_speculate=2: .* num_draft=2 is set",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_remedy(foretoken: Run, arguments: tuple[object, ...], message: str) -> None:
    done = foretoken(*PROMPT, *arguments)
    assert (done.code, done.out) == (2, "")
    assert re.search(message, done.err)
