"""Advice: each function by the facts on both sides of its limit, and that an engine says each warning once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, AsyncEngine, ConfigError, SamplingParams, SpecConfig
from foretoken.draft.eagle import EagleDrafter
from foretoken.engine import adviser
from foretoken.engine import llm as llm_module
from foretoken.engine.adviser import (
    Advice,
    LoadFacts,
    TextFormat,
    of_acceptance,
    of_draft_size,
    of_draft_text,
    of_load,
    of_memory,
    of_neighbours,
    of_short_answer,
    of_temperature,
)
from foretoken.errors import SpeculationWarning
from foretoken.heads.weights import head_bytes
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.helpers.tiny_heads import tiny_head

LOAD = LoadFacts(num_rounds=256, num_drafts=12, mean_requests=4.0, is_open=True, estimated_speedup=None)
FIXED = replace(LOAD, num_drafts=256, is_open=False, estimated_speedup=0.94)
TEXT = TextFormat("{{ a }}", {"eos_token": 2, "bos_token": 1})


@pytest.mark.parametrize(
    ("found", "topic", "words"),
    [
        (lambda: of_draft_size("d", 300, 100), "draft size", "draft 'd' is only 3.0 times smaller"),
        (lambda: of_acceptance("ngram", 256, 38, 0.49), "acceptance", "15% of 256 tokens drafted by 'ngram'"),
        (lambda: of_temperature(1.01), "temperature", "temperature=1.01 flattens"),
        (lambda: of_short_answer(49, 49, "d"), "short answer", "max_tokens=49: .* a prompt of 49 with draft 'd'"),
        (lambda: of_memory(86 << 30, 100 << 30, "memory"), "memory", "take 86.0 of the 100.0 GiB of memory.* 14% in"),
        (lambda: of_memory(120, 100, "the GPU"), "memory", "0% in reserve"),
        (lambda: of_neighbours(0.9, 0.7, 2, True), "neighbours", "take 0.9 cores.* 70% of the time: set OMP_WAIT_POL"),
        (lambda: of_load(LOAD), "load", "with 4 requests at once, .* only 5% of 256 rounds: use drafter='none'"),
        (lambda: of_load(FIXED), "load", "was 0.94x as fast .*: leave num_draft to 'auto'"),
        (
            lambda: of_draft_text("d", TEXT, replace(TEXT, chat_template="b")),
            "draft text",
            "another chat template than",
        ),
        (
            lambda: of_draft_text("d", TEXT, TextFormat("b", {"eos_token": 3, "bos_token": 1})),
            "draft text",
            "another chat template and eos_token than the target",
        ),
    ],
)
def test_a_finding_comes_with_its_remedy(found: Callable[[], Advice], topic: str, words: str) -> None:
    advice = found()
    assert advice.topic == topic
    assert re.search(words, str(advice))
    assert str(advice) == f"{advice.finding}: {advice.remedy}"


@pytest.mark.parametrize(
    "silent",
    [
        lambda: of_draft_size("d", 301, 100),
        lambda: of_draft_size("d", 100, 100),  # has a warning of its own
        lambda: of_draft_size("d", 100, 0),
        lambda: of_acceptance("ngram", 255, 0, 0.0),  # too early to say
        lambda: of_acceptance("ngram", 1000, 150, 0.4),
        lambda: of_acceptance("draft_model", 1000, 60, 0.5),  # a tree of 8 loses most of its tokens and still pays
        lambda: of_temperature(1.0),
        lambda: of_short_answer(50, 900, "d"),
        lambda: of_short_answer(49, 48, "d"),  # reading so short a prompt takes little
        lambda: of_memory(85, 100, "memory"),
        lambda: of_neighbours(None, 0.9, 2, True),
        lambda: of_neighbours(0.2, 0.9, 2, True),
        lambda: of_neighbours(2.0, 0.4, 2, True),
        lambda: of_neighbours(2.0, 0.9, 1, True),
        lambda: of_neighbours(2.0, 0.9, 2, False),
        lambda: of_load(replace(LOAD, num_rounds=255)),
        lambda: of_load(replace(LOAD, mean_requests=3.9)),
        lambda: of_load(replace(LOAD, num_drafts=13)),
        lambda: of_load(replace(FIXED, estimated_speedup=0.95)),
        lambda: of_load(replace(FIXED, estimated_speedup=None)),
        lambda: of_draft_text("d", TEXT, TEXT),
        lambda: of_draft_text("d", TEXT, TextFormat(None, {"eos_token": 2})),  # says nothing of chats
    ],
)
def test_nothing_is_said_without_need(silent: Callable[[], Advice | None]) -> None:
    assert silent() is None


# ---- an engine


@pytest.fixture
def told() -> Iterator[_Texts]:
    """The advice that comes during a test."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("error")
        warnings.simplefilter("always", SpeculationWarning)
        yield _Texts(found)


class _Texts(list[str]):
    def __init__(self, found: list[warnings.WarningMessage]) -> None:
        self._found = found

    def __iter__(self) -> Iterator[str]:
        return (str(one.message) for one in self._found)

    def about(self, words: str) -> int:
        """How many say so."""
        return sum(words in text for text in self)


def test_each_warning_comes_once(pair: SimpleNamespace, told: _Texts) -> None:
    spec = SpecConfig("draft_model", str(pair.draft), num_draft=2)
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=4, temperature=1.5, seed=1))
        assert list(told) == []  # no drafter
        for _ in range(2):
            llm.generate([[1, 2, 3, 4]] * 2, SamplingParams(max_tokens=4, temperature=1.5, seed=1), spec)
    assert [told.about(words) for words in ("times smaller", "temperature=1.5", "max_tokens=4")] == [1, 1, 1]
    assert len(list(told)) == 3


def test_auto_leaves_the_draft_out_of_short_answers_without_a_word(pair: SimpleNamespace, told: _Texts) -> None:
    with LLM(pair.target, SpecConfig("auto", str(pair.draft)), dtype="float32", cache_tokens=512) as llm:
        llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=4))
    assert told.about("max_tokens") == 0


def test_acceptance_and_load_are_told_after_the_answers(
    pair: SimpleNamespace, told: _Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the middle of a streamed one: also through a stream and an `AsyncEngine`."""
    facts: list[LoadFacts] = []
    monkeypatch.setattr(adviser, "of_load", facts.append)
    monkeypatch.setattr(
        adviser, "of_acceptance", lambda drafter, drafted, *_: Advice("acceptance", f"{drafter} {drafted}", "stop")
    )
    params, spec = SamplingParams(max_tokens=30, ignore_eos=True), SpecConfig("recycling", num_draft=3)
    before: list[list[str]] = []
    for ask in (
        lambda llm: llm.generate([[1, 2], [3, 4]], params, spec, on_step=lambda _: before.append(list(told))),
        lambda llm: [before.append(list(told)) for _ in llm.stream([1, 2], params, spec)],
        lambda llm: _ask_async(llm, params, spec),
    ):
        before.clear()
        count = len(list(told))
        with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
            ask(llm)
        assert all(len(one) == count for one in before)
        assert len(list(told)) == count + 1
        assert list(told)[-1].startswith("recycling ")
    of_two = facts[1] if facts[1].num_rounds else facts[0]
    assert (of_two.is_open, of_two.mean_requests > 1, of_two.num_rounds > of_two.num_drafts > 0) == (False, True, True)


def _ask_async(llm: LLM, params: SamplingParams, spec: SpecConfig) -> None:
    with AsyncEngine(llm) as engine:
        engine.submit([1, 2], params, spec).result()


def test_memory_counts_weights_and_full_caches(
    pair: SimpleNamespace, told: _Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
        target = llm.target
        used = target.weight_bytes + target.capacity_tokens * target.kv_bytes_per_token
    for limit, count in ((used / 0.8, 0), (used / 0.9, 1)):
        monkeypatch.setattr(adviser, "largest_cache_bytes", lambda _device, limit=limit: int(limit))
        with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
            assert told.about("in reserve") == count
    spec = SpecConfig("draft_model", str(pair.draft))
    with LLM(pair.target, spec, dtype="float32", cache_tokens=512) as llm:
        (model,) = next(iter(llm.engine.drafters.drafters.values())).models()
        cache = model.capacity_tokens * model.kv_bytes_per_token
    before = told.about("in reserve")
    for share, count in ((1.01, 0), (0.99, 1)):  # the draft's weights and its cache come on top
        limit = int((used + model.weight_bytes + share * cache) / 0.85)
        monkeypatch.setattr(adviser, "largest_cache_bytes", lambda _device, limit=limit: limit)
        with LLM(pair.target, spec, dtype="float32", cache_tokens=512):
            assert told.about("in reserve") == before + count


def test_a_drafter_that_is_made_anew_counts_once(
    pair: SimpleNamespace, told: _Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measurements do between answers."""
    spec = SpecConfig("draft_model", str(pair.draft))
    with LLM(pair.target, spec, dtype="float32", cache_tokens=512) as llm:
        models = [llm.target, *next(iter(llm.engine.drafters.drafters.values())).models()]
        used = sum(one.weight_bytes + one.capacity_tokens * one.kv_bytes_per_token for one in models)
    monkeypatch.setattr(adviser, "largest_cache_bytes", lambda _device: int(used / 0.84))
    with LLM(pair.target, spec, dtype="float32", cache_tokens=512) as llm:
        for _ in range(3):
            llm.take_drafters(spec)
            llm.prepare(spec)
    assert told.about("in reserve") == 0


def test_memory_counts_a_quantised_head_and_its_cache(
    pair: SimpleNamespace, told: _Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = str(tiny_head(tmp_path / "head", pair.target, "eagle"))
    spec, sizes = SpecConfig("eagle", head=head, draft_dtype="int8"), {"dtype": "float32", "cache_tokens": 512}
    with LLM(pair.target, spec, **sizes) as llm:
        drafter, target = next(iter(llm.engine.drafters.drafters.values())), llm.target
        assert isinstance(drafter, EagleDrafter)
        held = target.weight_bytes + target.capacity_tokens * target.kv_bytes_per_token + head_bytes(drafter.head)
        cache = drafter.cache.capacity_tokens * drafter.cache.kv_bytes_per_token
    before = told.about("in reserve")
    for share, count in ((1.01, 0), (0.99, 1)):
        limit = int((held + share * cache) / 0.85)
        monkeypatch.setattr(adviser, "largest_cache_bytes", lambda _device, limit=limit: limit)
        with LLM(pair.target, spec, **sizes):
            assert told.about("in reserve") == before + count


def test_a_draft_with_another_chat_template(tmp_path: Path, told: _Texts) -> None:
    for name, layers, template in (("target", 3, "{{ 1 }}"), ("draft", 1, "{{ 2 }}"), ("same", 1, "{{ 1 }}")):
        tiny_checkpoint(tmp_path / name, "llama", num_hidden_layers=layers, hidden_size=16, vocab_size=300)
        tiny_tokenizer(tmp_path / name, 300, chat_template=template)
    for draft, count in (("same", 0), ("draft", 1)):
        spec = SpecConfig("draft_model", str(tmp_path / draft))
        with LLM(tmp_path / "target", spec, dtype="float32", cache_tokens=256):
            assert told.about("another chat template") == count


# ---- the default drafter


def test_an_engine_drafts_by_default_and_answers_as_plain_decoding(pair: SimpleNamespace) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(pair.target, dtype="float32", cache_tokens=512) as llm:
        assert llm.spec == SpecConfig("auto")
        drafted, plain = llm.generate([[1, 2, 3]], params)[0], llm.generate([[1, 2, 3]], params, SpecConfig("none"))[0]
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.num_drafted == 0
    assert {origin.drafter for origin in plain.provenance} == {None}


def test_without_a_usable_drafter_it_decodes_plainly_and_says_why_once(
    pair: SimpleNamespace, told: _Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ConfigError("drafter", "ngram", "needs what is not there")

    monkeypatch.setattr(llm_module.DrafterFactory, "make", broken)
    with LLM(pair.target, dtype="float32", cache_tokens=256) as llm:
        assert llm.spec == SpecConfig()
        outputs = llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=5, ignore_eos=True))
        assert [len(output.token_ids) for output in outputs] == [5, 5]
    assert list(told) == ["decoding plainly, since no drafter can be used: drafter='ngram': needs what is not there"]
    with pytest.raises(ConfigError):  # who named it is told
        LLM(pair.target, SpecConfig("auto"), dtype="float32", cache_tokens=256)
