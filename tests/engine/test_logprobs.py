"""Log-probabilities: of the distribution a token was drawn from, or of the model; the same in plain and speculative
decoding.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine.scheduler import SchedulerConfig
from foretoken.errors import InputError
from tests.helpers.checkpoints import token_ids

PROMPT = token_ids(9, seed=3) * 2


@pytest.fixture(scope="module")
def oracle(pair: SimpleNamespace):
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", [None, "draft_model", "ngram"])
def test_model_logprobs_are_transformers(
    llm: LLM, pair: SimpleNamespace, oracle, temperature: float, drafter: str | None
) -> None:
    params = SamplingParams(
        max_tokens=12,
        temperature=temperature,
        seed=5,
        logprobs=3,
        logprobs_of="model",
        ignore_eos=True,
        frequency_penalty=0.5,
    )
    spec = SpecConfig(drafter, str(pair.draft) if drafter == "draft_model" else None)
    out = llm.generate([PROMPT], params, spec)[0]
    with torch.no_grad():
        distribution = oracle(torch.tensor([[*PROMPT, *out.token_ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(out.logprobs) == len(out.token_ids)
    for entry, token, row in zip(out.logprobs, out.token_ids, distribution, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert [t for t, _ in entry.top] == row.topk(3).indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_law_logprobs_are_the_same_with_and_without_drafts(llm: LLM, pair: SimpleNamespace, temperature: float) -> None:
    """Through residual, bonus and accepted tokens alike; at a temperature they are those of the warped distribution."""
    params = SamplingParams(
        max_tokens=16, temperature=temperature, top_p=0.9, seed=8, logprobs=2, ignore_eos=True, presence_penalty=0.7
    )
    plain = llm.generate([PROMPT], params)[0]
    for spec in (SpecConfig("draft_model", str(pair.draft), num_draft=4), SpecConfig("ngram")):
        out = llm.generate([PROMPT], params, spec)[0]
        assert out.token_ids == plain.token_ids
        for mine, theirs in zip(out.logprobs, plain.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]
    if temperature:
        assert all(sum(torch.tensor(p).exp() for _, p in entry.top) <= 1 + 1e-6 for entry in plain.logprobs)


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_log_probabilities_of_listed_tokens(llm: LLM, drafter: str | None) -> None:
    params = SamplingParams(max_tokens=8, logprobs=0, logprobs_of="model", ignore_eos=True)
    every = llm.generate([PROMPT], replace(params, logprobs=llm.target.vocab_size))[0]
    out = llm.generate([PROMPT], replace(params, logprob_token_ids=[5, 1, 5]), SpecConfig(drafter))[0]
    assert out.token_ids == every.token_ids
    for entry, known in zip(out.logprobs, every.logprobs, strict=True):
        values = dict(known.top)
        assert {token for token, _ in entry.top} == {1, 5, entry.token_id}
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        for token, value in entry.top:
            assert value == pytest.approx(values[token], abs=1e-4)
    for wrong in ({"logprob_token_ids": [llm.target.vocab_size]}, {"logprob_token_ids": [1], "logprobs": None}):
        with pytest.raises(InputError, match="logprob_token_ids"):
            llm.generate([PROMPT], replace(params, **wrong))


def test_logprobs_zero_reports_the_token_alone(llm: LLM) -> None:
    out = llm.generate([PROMPT], SamplingParams(max_tokens=4, logprobs=0))[0]
    assert [entry.top for entry in out.logprobs] == [()] * len(out.token_ids)
    assert llm.generate([PROMPT], SamplingParams(max_tokens=4))[0].logprobs is None


def test_streamed_logprobs_add_up(llm: LLM, pair: SimpleNamespace) -> None:
    params = SamplingParams(max_tokens=10, logprobs=1, ignore_eos=True)
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=3)
    streamed = [entry for piece in llm.stream(PROMPT, params, spec) for entry in piece.logprobs]
    whole = llm.generate([PROMPT], params, spec)[0].logprobs
    for mine, theirs in zip(streamed, whole, strict=True):  # how many are drafted in a step is the clock's choice
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("chunk", [3, 7, 512])
def test_prompt_logprobs(llm: LLM, oracle, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the prompt is cut, beside a request that does not ask for them."""
    monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(16, chunk))
    params = [
        SamplingParams(max_tokens=3, prompt_logprobs=2),
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=3, prompt_logprobs=0),
    ]
    prompts = [PROMPT, PROMPT[:5], [4]]
    first, none, single = llm.generate(prompts, params)
    assert none.prompt_logprobs is None
    assert single.prompt_logprobs == (None,)
    with torch.no_grad():
        distribution = oracle(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(PROMPT)
    for entry, token, row in zip(first.prompt_logprobs[1:], PROMPT[1:], distribution, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t for t, _ in entry.top] == row.topk(2).indices.tolist()


def test_prompt_logprobs_leave_the_answer_alone(llm: LLM) -> None:
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=1.0, seed=1))[0]
    asked = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=1.0, seed=1, prompt_logprobs=1))[0]
    assert asked.token_ids == plain.token_ids
