"""The family for tests and studies: it loads, belongs together, and speculation changes nothing."""

from __future__ import annotations

import warnings

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.model.names import model_folder, reference_heads, reference_models
from foretoken.registry import HEADS
from foretoken.train.corpus import edit_prompt

LIMIT_BYTES = 40 * 1024 * 1024
METHOD = '''def push(self, item):
    """Put an item on top of the stack."""
    if self.closed:
        raise ValueError("the stack is closed")
    self._items.append(item)
    self._size += 1
    return self._size'''
CLASS = '''class Version:
    """A version number that can be compared."""

    def __init__(self, major, minor):
        self.major = major
        self.minor = minor

    def __lt__(self, other):'''


def test_it_is_small() -> None:
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
        prompts = [edit_prompt(METHOD, "push", "append").rstrip(), CLASS]
        plain = llm.generate(prompts, params, spec=SpecConfig())
        for spec in (drafted, SpecConfig(drafter="ngram", num_draft=6)):
            speculative = llm.generate(prompts, params, spec=spec)
            assert [out.token_ids for out in speculative] == [out.token_ids for out in plain]
            assert sum(out.stats.num_accepted for out in speculative) > 0
        assert all(out.text for out in plain)
