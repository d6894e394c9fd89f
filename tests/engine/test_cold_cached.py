"""Default numerics in bfloat16 through the whole engine: cached, chunked, batched and preempted answers are the cold
ones, log-probabilities to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.engine.request import GenerateOutput
from foretoken.engine.scheduler import SchedulerConfig
from tests.helpers.checkpoints import token_ids

PROMPTS = [token_ids(33 + 12 * i, seed=40 + i) for i in range(10)]
PARAMS = SamplingParams(max_tokens=16, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def own_products() -> Iterator[None]:
    """Of bf16 matrices, also on a processor where oneDNN's are taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.model.layers.has_amx", lambda: False)
        yield


def opened(pair: SimpleNamespace, cache_tokens: int = 4096) -> LLM:
    return LLM(pair.target, SpecConfig(), dtype="bfloat16", cache_tokens=cache_tokens)


def told(outputs: Sequence[GenerateOutput]) -> list[tuple[object, object]]:
    return [(out.token_ids, out.logprobs) for out in outputs]


@pytest.fixture(scope="module")
def cold(pair: SimpleNamespace, own_products: None) -> list[tuple[object, object]]:
    """Each prompt alone; none begins like another."""
    with opened(pair) as llm:
        return told([llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS])


def test_cached_and_together(pair: SimpleNamespace, cold: list[tuple[object, object]]) -> None:
    with opened(pair) as llm:
        assert told(llm.generate(PROMPTS, PARAMS)) == cold
        assert not llm.stats.prefix.num_found_tokens
        assert told([llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]) == cold
        assert llm.stats.prefix.num_found_tokens > 10 * 32
        assert told(llm.generate(PROMPTS, PARAMS, SpecConfig("ngram", num_draft=6))) == cold


@pytest.mark.parametrize("chunk", [7, 33])
def test_chunks(
    pair: SimpleNamespace, cold: list[tuple[object, object]], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(pair) as llm:
        monkeypatch.setattr(llm.engine.scheduler, "config", SchedulerConfig(16, chunk))
        assert told(llm.generate(PROMPTS, PARAMS)) == cold


def test_preempted_and_resumed(pair: SimpleNamespace, cold: list[tuple[object, object]]) -> None:
    """Some give their cache back in the middle of their answers, and others take it before they are read again."""
    with opened(pair, cache_tokens=512) as llm:
        states = [llm.engine.submit(prompt, PARAMS, SpecConfig()) for prompt in PROMPTS]
        for _ in range(6):
            llm.engine.step()
        for state in [state for state in states if state.request_id in llm.engine.scheduler.running][:2]:
            llm.engine.scheduler.preempt(state)
        while llm.engine.has_work:
            llm.engine.step()
        assert [tuple(state.output_ids) for state in states] == [tokens for tokens, _ in cold]
        assert sum(state.stats.num_preempted for state in states) == 2


def test_a_real_model(smollm2_file: Path) -> None:
    """A GGUF file: cold, behind its own cached beginning, and all at once."""
    asked = ("What is the capital of France?", "Write a Python function that reverses a list.", "Why is the sky blue?")
    prompts = [
        f"<|im_start|>system\nYou answer briefly, number {i}.<|im_end|>\n" + 3 * f"{text}\n"
        for i, text in enumerate(asked)
    ]
    with LLM(smollm2_file, SpecConfig(), cache_tokens=2048) as llm:
        alone = told([llm.generate([prompt], PARAMS)[0] for prompt in prompts])
        assert told([llm.generate([prompt], PARAMS)[0] for prompt in prompts]) == alone
        assert llm.stats.prefix.num_found_tokens >= 3 * 32
    with LLM(smollm2_file, SpecConfig(), cache_tokens=2048) as llm:
        assert told(llm.generate(prompts, PARAMS)) == alone
