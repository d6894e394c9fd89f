"""Shared beginnings: computed once per tenant, for the target and for drafts, and never at the price of another
answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.model.interface import Segment
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import token_ids

PROMPT = token_ids(150, seed=3)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=2048, max_prompt_tokens=64) as llm:
        yield llm
        check_idle(llm.engine)


@pytest.fixture
def rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of the target."""
    counted: list[int] = []
    forward = llm.target.forward

    def counting(tokens: object, segments: list[Segment], *more: object) -> object:
        counted.append(sum(segment.num_rows for segment in segments))
        return forward(tokens, segments, *more)

    monkeypatch.setattr(llm.target, "forward", counting)
    return counted


def plain(pair: SimpleNamespace, prompt: list[int]) -> tuple[int, ...]:
    with LLM(pair.target, SpecConfig(), dtype="float32") as fresh:
        return fresh.generate([prompt], GREEDY)[0].token_ids


def test_the_same_prompt_is_read_once(llm: LLM, rows: list[int], pair: SimpleNamespace) -> None:
    first = llm.generate([PROMPT], GREEDY)[0]
    assert sum(rows) == 150 + 11
    rows.clear()
    second = llm.generate([PROMPT], GREEDY)[0]
    assert second.token_ids == first.token_ids == plain(pair, PROMPT)
    assert sum(rows) == 150 - 128 + 11  # four blocks of 32 were there
    assert llm.stats.prefix.num_found_tokens == 128


def test_another_end_shares_the_beginning_only(llm: LLM, rows: list[int], pair: SimpleNamespace) -> None:
    llm.generate([PROMPT], GREEDY)
    rows.clear()
    other = [*PROMPT[:70], *token_ids(30, seed=9)]
    assert llm.generate([other], GREEDY)[0].token_ids == plain(pair, other)
    assert sum(rows) == 100 - 64 + 11


def test_a_dialogue_goes_on_where_the_answer_ended(llm: LLM, rows: list[int], pair: SimpleNamespace) -> None:
    answer = llm.generate([PROMPT], GREEDY)[0].token_ids
    rows.clear()
    more = [*PROMPT, *answer, *token_ids(20, seed=5)]
    assert llm.generate([more], GREEDY)[0].token_ids == plain(pair, more)
    assert sum(rows) == len(more) - 160 + 11  # five blocks: the answer's are among them


def test_tenants_do_not_meet(llm: LLM, rows: list[int]) -> None:
    """Neither in the target's cache nor in a draft's, composite drafters included: how fast an answer comes tells
    nothing.
    """
    llm.generate([PROMPT], replace(GREEDY, tenant="a"))
    for tenant in ("", "b"):
        rows.clear()
        llm.generate([PROMPT], replace(GREEDY, tenant=tenant))
        assert sum(rows) == 150 + 11
    rows.clear()
    llm.generate([PROMPT], replace(GREEDY, tenant="a"))
    assert sum(rows) < 50


@pytest.mark.parametrize("drafter", ["draft_model", "mix"])
def test_a_draft_begins_there_too_and_for_its_tenant_only(llm: LLM, pair: SimpleNamespace, drafter: str) -> None:
    def ask(tenant: str) -> int:
        parts = ("draft_model",) if drafter == "mix" else ()  # a mix of many might not ask its model
        spec = SpecConfig(drafter, str(pair.draft), num_draft=3, parts=parts)
        assert llm.generate([PROMPT], replace(GREEDY, tenant=tenant), spec)[0].token_ids == expected
        (made,) = llm._drafters.drafters.values()
        model = made.model if drafter == "draft_model" else made.parts[-1].model
        return int(model.prefix_stats.num_found_tokens)

    expected = plain(pair, PROMPT)
    assert [ask("a"), ask("a"), ask("b"), ask("b")] == [0, 128, 128, 256]


@pytest.mark.parametrize("n", [4])
def test_answers_to_one_prompt_read_it_once(llm: LLM, rows: list[int], n: int) -> None:
    out = llm.generate([PROMPT], SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=n, ignore_eos=True))[0]
    assert len(out.choices) == n
    assert sum(rows) == 150 + (n - 1) * (150 - 128) + n * 5
    alone = llm.generate([PROMPT], SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True))[0]
    assert out.choices[0].token_ids == alone.token_ids


def test_whoever_wants_every_row_of_the_prompt_gets_it(llm: LLM, rows: list[int]) -> None:
    llm.generate([PROMPT], GREEDY)
    rows.clear()
    out = llm.generate([PROMPT], SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))[0]
    assert len(out.prompt_logprobs) == 150
    assert sum(rows) == 151


def test_speculation_does_not_lower_the_hit_rate(llm: LLM, pair: SimpleNamespace) -> None:
    """The same traffic, plainly and with draft trees: the same blocks are found."""
    prompts = [[*PROMPT[: 40 * (1 + i % 3)], *token_ids(10, seed=i)] for i in range(9)]
    found = []
    for tenant, spec in (("plain", SpecConfig()), ("trees", SpecConfig("recycling", num_draft=7))):
        before = llm.stats.prefix.num_found_tokens
        for prompt in prompts:
            llm.generate([prompt], replace(GREEDY, tenant=tenant), spec)
        found.append(llm.stats.prefix.num_found_tokens - before)
    assert found[0] == found[1] > 0


def test_a_full_cache_gives_up_what_is_only_kept(pair: SimpleNamespace) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=256) as llm:
        for seed in range(12):
            prompt = token_ids(100, seed=seed)
            assert len(llm.generate([prompt], GREEDY)[0].token_ids) == 12
        assert llm.stats.prefix.num_evicted_blocks > 0
        check_idle(llm.engine)


def test_nobody_waits_for_what_it_cannot_have_or_who_comes_after_it(llm: LLM) -> None:
    """While a prompt is read in pieces only a later request of the same tenant waits to share it."""
    engine = llm.engine
    first = engine.submit(PROMPT, replace(GREEDY, tenant="a"), SpecConfig())
    engine.step()
    stranger = engine.submit(PROMPT, replace(GREEDY, tenant="b"), SpecConfig())
    urgent = engine.submit(PROMPT, replace(GREEDY, priority=-9, tenant="a"), SpecConfig())
    later = engine.submit(PROMPT, replace(GREEDY, tenant="b"), SpecConfig())
    engine.step()
    assert set(engine.scheduler.running) == {first.request_id, stranger.request_id, urgent.request_id}
    while engine.has_work:
        engine.step()
    assert first.output_ids == stranger.output_ids == urgent.output_ids == later.output_ids
    assert later.stats.num_cached_tokens == 128
