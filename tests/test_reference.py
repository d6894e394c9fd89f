"""The family that ships with the package: it loads, belongs together, and speculation changes nothing."""

from __future__ import annotations

import warnings

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.cli.demo import PROMPTS
from foretoken.model.names import model_folder, reference_heads, reference_models
from foretoken.registry import HEADS

LIMIT_BYTES = 40 * 1024 * 1024


def test_it_is_small_enough_to_ship() -> None:
    assert reference_models() == ["reference:draft", "reference:target"]
    assert set(reference_heads()) <= {f"reference:{name}" for name in HEADS}
    folders = [*map(model_folder, reference_models()), *map(model_folder, reference_heads())]
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < LIMIT_BYTES


def test_speculation_gives_the_plain_answer_in_float32() -> None:
    drafted = SpecConfig(drafter="draft_model", draft="reference:draft", num_draft=5)
    with warnings.catch_warnings(), LLM("reference:target", spec=drafted, dtype="float32") as llm:
        warnings.simplefilter("error")
        params = SamplingParams(max_tokens=40)
        prompts = list(PROMPTS.values())
        plain = llm.generate(prompts, params, spec=SpecConfig())
        for spec in (drafted, SpecConfig(drafter="ngram", num_draft=6)):
            speculative = llm.generate(prompts, params, spec=spec)
            assert [out.token_ids for out in speculative] == [out.token_ids for out in plain]
            assert sum(out.stats.num_accepted for out in speculative) > 0
        assert all(out.text for out in plain)
