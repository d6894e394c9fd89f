"""Two rules on the same prompts: pairs, ratios, intervals."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM
from foretoken.errors import InputError
from foretoken.measure.speed.options import SpeedOptions
from foretoken.measure.speed.plan import SpeedSample, SpeedSetting
from studies.rules.compare import compare_rules, rule_pairs
from tests.measure.fakes import PROMPTS, answer

RULES = ("rejection", "block")


def samples(name: str, seconds: float, steps: int) -> list[SpeedSample]:
    setting = SpeedSetting(name, drafter="draft_model", num_draft=5)
    return [
        SpeedSample(setting, index, prompt.slice, 0.6, repeat, answer(10, seconds * (1 + index), num_steps=steps))
        for repeat in range(2)
        for index, prompt in enumerate(PROMPTS)
    ]


def test_the_second_rule_is_compared_with_the_first() -> None:
    own = [
        *samples("plain", 1.0, 10),
        *samples("draft_model-5 rejection", 0.5, 5),
        *samples("draft_model-5 block", 0.4, 4),
    ]
    pairs = rule_pairs(own, PROMPTS, RULES)
    longer = [replace(one, prompt_index=one.prompt_index + 3 * more) for one in own for more in range(2)]
    many = rule_pairs(longer, (*PROMPTS, *PROMPTS), RULES)
    assert [(pair.setting, pair.slice, pair.num_answers) for pair in pairs] == [
        ("draft_model-5", "code", 4),
        ("draft_model-5", "edit", 2),
        ("draft_model-5", "all", 6),
    ]
    assert pairs[0].emitted_per_step == (2.0, 2.5)
    assert pairs[0].steps_ratio is not None
    assert pairs[0].speed_ratio is not None
    assert (pairs[0].steps_ratio.ratio, pairs[0].speed_ratio.ratio) == (1.25, pytest.approx(1.25))
    assert pairs[2].speed_ratio is not None
    assert pairs[2].speed_ratio.low is None  # three prompts
    assert many[2].speed_ratio is not None
    assert many[2].speed_ratio.low == pytest.approx(1.25)  # prompts of different length do not widen it


def test_a_whole_study_on_a_tiny_pair(text_pair: SimpleNamespace) -> None:
    options = SpeedOptions(
        str(text_pair.target),
        str(text_pair.draft),
        drafters=("draft_model",),
        num_drafts=(3,),
        rules=RULES,
        slices=("code", "json"),
        prompts_per_slice=2,
        temperatures=(0.3, 1.0),
        max_tokens=6,
        repeats=1,
        warmup=0,
    )
    with LLM(text_pair.target, dtype="float32", cache_tokens=4096) as llm:
        report = compare_rules(options, "python -m studies.rules", llm)
        again = compare_rules(options, "python -m studies.rules", llm)
    found = json.loads(report.json_line())
    assert {(row["slice"], row["temperature"]) for row in found["rows"]} == {
        (name, temperature) for name in ("code", "json", "all") for temperature in (0.3, 1.0)
    }
    assert [row.emitted_per_step for row in again.rows] == [row.emitted_per_step for row in report.rows]
    assert [row.steps_ratio for row in again.rows] == [row.steps_ratio for row in report.rows]
    assert report.tables[0].title == "block against rejection: code, temperature 0.3"


def test_two_rules_are_needed() -> None:
    with pytest.raises(InputError, match="rules"):
        compare_rules(SpeedOptions("t", drafters=("ngram",), rules=("rejection",)), "c")
