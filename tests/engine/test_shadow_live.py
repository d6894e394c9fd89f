"""The shadow inside a running engine: it finds nothing in a healthy one, raises the alarm in a broken one, and never
takes room from requests.
"""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import pytest

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.verify.rejection import RejectionRule
from tests.helpers.checkpoints import token_ids
from tests.helpers.usual import some_of

PROMPTS = [token_ids(5 + i % 7, seed=i) for i in range(24)]


def spec_of(pair: SimpleNamespace, drafter: str | None) -> SpecConfig:
    return (
        SpecConfig(drafter, str(pair.draft) if drafter == "draft_model" else None, num_draft=3)
        if drafter
        else SpecConfig()
    )


def run(llm: LLM, spec: SpecConfig, temperature: float, rounds: int = 1) -> None:
    """At most so many rounds: an alarm ends them."""
    for turn in range(rounds):
        if llm.stats.shadow is not None and llm.stats.shadow.alarm:
            break
        seeds = range(turn * len(PROMPTS), (turn + 1) * len(PROMPTS))
        params = [
            SamplingParams(max_tokens=40, temperature=temperature, ignore_eos=True, frequency_penalty=0.3, seed=seed)
            for seed in seeds
        ]
        llm.generate(PROMPTS, params, spec)
        llm.drain_shadow()


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    some_of(
        itertools.product((None, "draft_model", "ngram"), (0.0, 1.0)),
        {(None, 1.0), ("draft_model", 1.0), ("ngram", 0.0)},
    ),
)
def test_a_healthy_engine_raises_no_alarm(pair: SimpleNamespace, drafter: str | None, temperature: float) -> None:
    """Every request is followed, every drafter, with penalties; its blocks come back."""
    with LLM(pair.target, dtype="float32", cache_tokens=4096, shadow_rate=1.0) as llm, warnings.catch_warnings():
        warnings.simplefilter("error")
        run(llm, spec_of(pair, drafter), temperature)
        shadow = llm.stats.shadow
        assert shadow is not None
        assert (shadow.num_requests, shadow.num_waiting, shadow.alarm) == (len(PROMPTS), 0, False)
        assert shadow.num_tokens == len(PROMPTS) * 40
        assert llm.target.num_free_tokens() == llm.target.capacity_tokens


@pytest.mark.repeated
def test_a_broken_rule_raises_the_alarm(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other chain rule: proof/test_shadow_rate.py."""
    check_alarm(pair, RejectionRule, monkeypatch)


def check_alarm(pair: SimpleNamespace, rule: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own distribution in place of the residual."""
    if rule is RejectionRule:
        monkeypatch.setattr(rule, "next_token_weights", lambda self, draft, probs, rows: probs[list(rows)])
    else:
        monkeypatch.setattr(
            "foretoken.verify.block.residual_weights", lambda draft, probs, rows, reach: probs[list(rows)]
        )
    with LLM(pair.target, dtype="float32", cache_tokens=4096, shadow_rate=1.0) as llm:
        with pytest.warns(UserWarning, match="shadow check"):
            run(llm, SpecConfig("draft_model", str(pair.draft), num_draft=4, rule=rule.name), 1.0, rounds=16)
        assert llm.stats.shadow is not None
        assert llm.stats.shadow.alarm


def test_a_share_is_followed(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="float32", cache_tokens=4096, shadow_rate=0.25) as llm:
        run(llm, SpecConfig("ngram"), 0.0, rounds=6)
        assert 0.12 < llm.stats.shadow.num_requests / (6 * len(PROMPTS)) < 0.4


def test_a_full_cache_serves_requests_first(pair: SimpleNamespace) -> None:
    """With room for little more than one request the queue empties, and the shadow waits its turn."""
    with LLM(pair.target, dtype="float32", cache_tokens=64, shadow_rate=1.0) as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, SpecConfig("ngram"))
        assert all(out.finish_reason == "length" for out in outputs)
        llm.drain_shadow()
        assert llm.stats.shadow.num_waiting == 0
        assert not llm.stats.shadow.alarm


@pytest.mark.parametrize("rate", [-0.1, 1.5, "all", True])
def test_a_bad_rate(pair: SimpleNamespace, rate: object) -> None:
    with pytest.raises(ConfigError, match="shadow_rate"):
        LLM(pair.target, shadow_rate=rate)


def test_without_a_shadow_there_is_nothing(llm: LLM) -> None:
    assert llm.stats.shadow is None
