"""How often the shadow raises a false alarm over many parameters and number formats, and that it finds a planted error
in each format.

Every stream of tokens has an e-value of its own. If all tokens follow the target's distribution, it ever reaches 20 in
at most one stream of twenty, and the alarm's bound of 1e6 in one of a million.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine import from_logits
from foretoken.engine import runner as runner_module
from foretoken.engine.shadow.shadow import Shadow
from foretoken.text.sampling import target_probs
from foretoken.verify.block import BlockRule
from tests.engine.test_shadow_live import check_alarm
from tests.helpers.usual import some_of

DTYPES = ("bfloat16", "float16", "float32")
PROMPTS = ["def main():\n", "class Parser:\n    ", "import os\n", "The quick brown fox", "x = [1,"] * 4
SPECS = [
    SpecConfig(),
    SpecConfig("ngram", num_draft=3),
    SpecConfig("draft_model", "reference:draft", num_draft=3, rule="block"),
]
MIXES: list[dict[str, Any]] = [
    {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 3.0, "top_p": 0.1},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "min_p": 1.0},
    {"temperature": 0.02},
    {"temperature": 0.1},
    {"temperature": 0.3, "top_k": 40},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {11: 3.0}},
    {
        "temperature": 0.8,
        "top_k": 3,
        "repetition_penalty": 4.0,
        "presence_penalty": -0.5,
        "min_tokens": 5,
        "bad_words": ["self"],
    },
    {"temperature": 1.2, "top_k": 4, "regex": r"[a-e ]{40,60}"},
]


def followed(llm: LLM, params: dict[str, Any], first_seed: int, turns: int = 3, max_tokens: int = 18) -> Shadow:
    """A shadow of its own that has seen some answers with these parameters, by every drafter."""
    shadow = Shadow(
        llm.target,
        1.0,
        room=llm.engine.scheduler,
        fresh_processors=llm.engine.admission.fresh_processors,
        tokens_per_step=256,
    )
    llm.engine.watchers.append(shadow)
    try:
        for turn in range(turns):
            seeds = range(first_seed + turn * len(PROMPTS), first_seed + (turn + 1) * len(PROMPTS))
            each = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, **params) for seed in seeds]
            llm.generate(PROMPTS, each, SPECS[turn % len(SPECS)])
        shadow.drain()
    finally:
        llm.engine.watchers.remove(shadow)
    return shadow


# The format with the coarsest steps comes nearest to an alarm.
@pytest.mark.parametrize("dtype", some_of(DTYPES, {"bfloat16"}, pytest.mark.release))
def test_w2_a_sound_engine_raises_no_alarm(dtype: str) -> None:
    """Every mix of parameters is a stream; among 14 the chance of more than 5 above 20 is 1e-4, and the seeds are
    fixed.
    """
    above = 0
    with LLM("reference:target", dtype=dtype, cache_tokens=4096) as llm:
        for number, params in enumerate(MIXES):
            found = followed(llm, params, first_seed=10_000 * number).stats
            assert not found.alarm, f"{params}: {found.message}"
            assert found.num_tokens > 800
            above += found.e_value >= 20
    assert above <= 5


# Each format and each filter; the product before a release.
@pytest.mark.parametrize(
    ("dtype", "mixes"),
    [
        *((dtype, MIXES[place:7:3]) for place, dtype in enumerate(DTYPES)),
        *(pytest.param(dtype, MIXES[:7], marks=pytest.mark.release) for dtype in DTYPES),
    ],
)
def test_w2_a_filter_that_is_left_out_is_found(
    dtype: str, mixes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that no rounding brings inside come soon."""

    def unfiltered(logits: Tensor, params: Sequence[SamplingParams], best: Tensor | None = None) -> Tensor:
        return target_probs(logits, [replace(one, top_k=0, top_p=1.0, min_p=0.0) for one in params], best)

    monkeypatch.setattr(runner_module, "target_probs", unfiltered)
    monkeypatch.setattr(from_logits, "verify_coupled", lambda *_: None)  # it needs no distributions
    with LLM("reference:target", dtype=dtype, cache_tokens=4096) as llm:
        for number, params in enumerate(mixes):
            with pytest.warns(UserWarning, match="have probability 0 under the target"):
                assert followed(llm, params, first_seed=10_000 * number, turns=1).stats.alarm


@pytest.mark.parametrize("dtype", DTYPES)
def test_w2_another_temperature_is_found_behind_filters(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution among the tokens that are certain is too flat: no token is impossible."""

    def warmer(logits: Tensor, params: Sequence[SamplingParams], best: Tensor | None = None) -> Tensor:
        return target_probs(logits, [replace(one, temperature=1.5 * one.temperature) for one in params], best)

    monkeypatch.setattr(runner_module, "target_probs", warmer)
    monkeypatch.setattr(from_logits, "verify_coupled", lambda *_: None)  # it needs no distributions
    with (
        LLM("reference:target", dtype=dtype, cache_tokens=4096) as llm,
        pytest.warns(UserWarning, match="do not follow the target's distribution"),
    ):
        found = followed(llm, {"temperature": 0.8, "top_k": 20}, first_seed=0, turns=4).stats
    assert found.alarm
    assert math.isfinite(found.e_value)


def test_a_broken_block_rule_raises_the_alarm(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    check_alarm(pair, BlockRule, monkeypatch)
