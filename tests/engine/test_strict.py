"""Strict numerics through the whole engine: in bfloat16 the speculative answer is the plain one, token for token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from foretoken import LLM, ConfigError, SamplingParams, SpecConfig
from foretoken.engine.scheduler import SchedulerConfig
from tests.helpers.checkpoints import token_ids
from tests.helpers.usual import some_of

PROMPTS = [token_ids(2 + 5 * i, seed=90 + i) if i % 3 else token_ids(4 + 3 * i, seed=i) * 2 for i in range(10)]


@pytest.fixture(scope="module")
def strict(pair: SimpleNamespace) -> Iterator[LLM]:
    with LLM(pair.target, dtype="bfloat16", cache_tokens=4096, numerics="strict") as llm:
        yield llm


def specs_of(pair: SimpleNamespace) -> list[SpecConfig]:
    draft = str(pair.draft)
    return [
        *(SpecConfig("draft_model", draft, num_draft=n) for n in (1, 3, 8)),
        *(SpecConfig("ngram", num_draft=n) for n in (2, 6, 12)),
        SpecConfig("lookahead", num_draft=4),
        SpecConfig(),
    ]


@pytest.mark.parametrize(
    ("temperature", "chunk"), some_of(itertools.product((0.0, 0.8), (512, 9)), {(0.0, 9), (0.8, 512)})
)
def test_speculative_answers_are_the_plain_ones(
    strict: LLM, pair: SimpleNamespace, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and coupled, alone and in batches, with prompts cut into chunks as neighbours have it."""
    each = [
        SamplingParams(max_tokens=48, temperature=temperature, seed=i, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    plain = [strict.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, each, strict=True)]
    monkeypatch.setattr(strict.engine.scheduler, "config", SchedulerConfig(16, chunk))
    specs, accepted = specs_of(pair), 0
    for turn in range(3):
        outputs = strict.generate(PROMPTS, each, [specs[(turn + i) % len(specs)] for i in range(len(PROMPTS))])
        assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
        accepted += sum(out.stats.num_accepted for out in outputs)
    assert accepted > 100
    if temperature == 0:
        assert sum(out.stats.num_near_ties for out in plain) > 0, "without near ties this proves little"


def test_logprobs_are_bitwise_the_same(strict: LLM, pair: SimpleNamespace) -> None:
    params = SamplingParams(max_tokens=32, logprobs=3, ignore_eos=True)
    plain = strict.generate(PROMPTS[:4], params)
    for spec in (SpecConfig("draft_model", str(pair.draft), num_draft=5), SpecConfig("lookahead", num_draft=5)):
        drafted = strict.generate(PROMPTS[:4], params, spec)
        assert [out.logprobs for out in drafted] == [out.logprobs for out in plain]


def test_the_reference_target_in_bfloat16() -> None:
    """A real model and real text, where near ties do occur."""
    prompts = [
        "import os\n\n\ndef walk(path):\n    for name in",
        "class Stack:\n    def __init__(self):\n        self.items =",
    ]
    with LLM("reference:target", dtype="bfloat16", cache_tokens=2048, numerics="strict") as llm:
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        plain = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        for spec in (SpecConfig("ngram", num_draft=8), SpecConfig("draft_model", "reference:draft", num_draft=5)):
            assert [out.token_ids for out in llm.generate(prompts, params, spec)] == plain


def test_unknown_numerics(pair: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="numerics"):
        LLM(pair.target, numerics="exact")


@pytest.mark.gpu
def test_strict_on_a_gpu(pair: SimpleNamespace) -> None:
    with LLM(pair.target, dtype="bfloat16", device="cuda", cache_tokens=4096, numerics="strict") as llm:
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        plain = [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
        outputs = llm.generate(PROMPTS, params, SpecConfig("draft_model", str(pair.draft), num_draft=4))
        assert [out.token_ids for out in outputs] == plain
        assert torch.cuda.is_available()
