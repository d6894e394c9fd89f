"""Every drafter's cache begins with what its tenant left there, and no drafter costs the target a hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.config import DRAFTERS
from foretoken.draft.own_cache import OwnCache
from foretoken.kv.prefix import PrefixStats
from foretoken.model.interface import Segment
from tests.draft.test_contract import CASES
from tests.helpers.audit import check_idle
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer
from tests.helpers.mtp_checkpoints import add_mtp
from tests.helpers.specs import predicting, spec_of
from tests.helpers.usual import some_of

COLUMNS = 400
PROMPT = token_ids(150, 355, seed=3)
WITH_CACHE = (
    "draft_model",
    "padded",
    "static",
    "best_first",
    "cascade",
    "two levels",
    "mix",
    "strings",
    "intersection",
    "mix of others",
)
# To the cache these are other drafters' chains and trees: proof/test_prefix.py.
ALIKE = (
    "draft_model:int8",
    "draft_model:int4",
    "draft_model/static",
    "draft_model/best_first",
    "mtp/best_first",
    "early_exit:adapter",
    "eagle:1",
    "eagle/best_first",
    "medusa",
    "block:cut/best_first",
)
# Chains of a model, of a lookup, of the text, of first layers, and those that read hidden states.
USUAL = ("ngram", "recycling", "predicted", "early_exit", "eagle")
pytestmark = pytest.mark.filterwarnings("ignore:draft .* has another tokenizer", "ignore:the draft has")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, drafts with its tokenizer, one of them with more columns, and one with another tokenizer, which needs
    more tokens.
    """
    folder = tmp_path_factory.mktemp("prefixes")
    for seed, name in enumerate(("target", "draft", "foreign", "padded")):
        columns = COLUMNS + 16 * (name == "padded")
        shape = {
            "num_hidden_layers": 1 + (name == "target"),
            "hidden_size": 32,
            "vocab_size": columns,
            "max_position_embeddings": 2048,
        }
        tiny_checkpoint(folder / name, "llama", seed, **shape)
        foreign_tokenizer(folder / name, "sentencepiece") if name == "foreign" else tiny_tokenizer(
            folder / name, COLUMNS, PROSE
        )
    add_mtp(folder / "target")
    return {name: folder / name for name in ("target", "draft", "foreign", "padded")}


def spec_for(name: str, folders: dict[str, Path]) -> SpecConfig:
    own, foreign = (
        {"draft": str(folders["draft"]), "num_draft": 3},
        SpecConfig("draft_model", str(folders["foreign"])),
    )
    if name == "padded":
        return SpecConfig("draft_model", **own | {"draft": str(folders["padded"])})
    if name in ("static", "best_first"):
        return SpecConfig("draft_model", tree=name, branching=2, **own)
    if name in ("strings", "intersection"):
        return SpecConfig("draft_model", **own | {"draft": str(folders["foreign"])}, draft_vocabulary=name)
    if name == "two levels":
        return SpecConfig("cascade", parts=("draft_model", SpecConfig("draft_model", str(folders["target"]))), **own)
    if name == "mix":
        return SpecConfig("mix", parts=("draft_model",), **own)
    return SpecConfig("mix", parts=(foreign,), num_draft=3) if name == "mix of others" else SpecConfig(name, **own)


def open_llm(folders: dict[str, Path]) -> LLM:
    return LLM(folders["target"], SpecConfig(), dtype="float32", cache_tokens=4096)


def caches(drafter: object) -> list[OwnCache]:
    """The caches of a drafter and its parts."""
    found = [getattr(drafter, "_cache", None), *(level.cache for level in getattr(drafter, "levels", ()))]
    return [cache for cache in found if cache is not None] + [
        cache for part in getattr(drafter, "parts", ()) for cache in caches(part)
    ]


def count_rows(cache: OwnCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []
    forward = cache.model.forward

    def counting(tokens: object, segments: list[Segment], *more: object) -> object:
        rows.append(sum(segment.num_rows for segment in segments))
        return forward(tokens, segments, *more)

    monkeypatch.setattr(cache.model, "forward", counting)
    return rows


@pytest.mark.parametrize(
    ("name", "temperature"),
    some_of(
        itertools.product(WITH_CACHE, (0.0, 1.0)),
        {*((name, 0.0) for name in WITH_CACHE), ("draft_model", 1.0), ("two levels", 1.0)},
    ),
)
def test_a_long_prompt_is_read_once_per_tenant(
    folders: dict[str, Path], name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every model that drafts; the second answer is the first, and that of a fresh engine that drafts nothing."""
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=temperature == 0)
    with open_llm(folders) as fresh:
        expected = fresh.generate([PROMPT], params)[0].token_ids
    with open_llm(folders) as llm:
        llm.prepare(spec_for(name, folders))
        (drafter,) = llm._drafters.drafters.values()
        each = [(cache, count_rows(cache, monkeypatch)) for cache in caches(drafter)]
        assert len(each) == 1 + (name == "two levels")

        def ask(tenant: str, prompt: list[int] = PROMPT) -> list[tuple[int, int]]:
            """Rows run and tokens found by each cache."""
            before = [cache.model.prefix_stats.num_found_tokens for cache, _ in each]
            for _, rows in each:
                rows.clear()
            told = llm.generate([prompt], replace(params, tenant=tenant), spec_for(name, folders))[0].token_ids
            assert told == expected or prompt != PROMPT
            return [
                (sum(rows), cache.model.prefix_stats.num_found_tokens - was)
                for (cache, rows), was in zip(each, before, strict=True)
            ]

        first, second, other, again = ask("a"), ask("a"), ask("b"), ask("b")
        for (read, found), (rows, known) in zip(first, second, strict=True):
            assert found == 0
            assert known >= 128
            assert rows == read - known
        assert other == first
        assert again == second
        turn = ask("b", [*PROMPT, *expected, *token_ids(40, 355, seed=6)])  # goes on behind the answer
        assert max(found for _, found in turn) >= len(PROMPT)
        check_idle(llm)


def dialogues(ask: Callable[[list[list[int]]], list[list[int]]], seed: int) -> None:
    """Prompts that begin alike, one after the other and all at once, then the next turns of each."""
    common = token_ids(70, 355, seed=seed)
    texts = [[*common[: 40 + 10 * i], *token_ids(12 + i, 355, seed=seed + i)] for i in range(4)]
    for _ in range(2):
        alone = [ask([text])[0] for text in texts[:2]]
        answers = [*alone, *ask(texts[2:])]
        texts = [
            [*text, *answer, *token_ids(9, 355, seed=len(text))] for text, answer in zip(texts, answers, strict=True)
        ]


def traffic(folders: dict[str, Path], name: str | None) -> tuple[list[list[int]], PrefixStats]:
    """Answers to the dialogues and what the prefix cache found, with a drafter or plain."""
    spec = SpecConfig() if name is None else spec_of(name, folders["draft"], num_draft=6)
    answers: list[list[int]] = []
    with (
        LLM(folders["target"], SpecConfig(), dtype="float32", cache_tokens=8192) as llm,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(llm.engine.admission, "eos_token_ids", frozenset(range(0, COLUMNS, 13)))

        def ask(prompts: list[list[int]]) -> list[list[int]]:
            params = [
                predicting(
                    spec,
                    SamplingParams(max_tokens=40, ignore_eos=i % 2 == 0, repetition_penalty=1.2),
                    token_ids(40, 355),
                )
                for i in range(len(prompts))
            ]
            told = [list(out.token_ids) for out in llm.generate(prompts, params, spec)]
            answers.extend(told)
            return told

        dialogues(ask, 100)
        check_idle(llm)
        assert name in (None, "early_exit") or llm.stats.num_drafted > 0
        assert llm.stats.prefix is not None
        return answers, llm.stats.prefix


@pytest.fixture(scope="module")
def plain_traffic(folders: dict[str, Path]) -> tuple[list[list[int]], PrefixStats]:
    return traffic(folders, None)


@pytest.mark.parametrize("name", some_of([name for name in CASES if name not in ALIKE], USUAL))
def test_speculation_never_lowers_the_hit_rate(
    folders: dict[str, Path], name: str, plain_traffic: tuple[list[list[int]], PrefixStats]
) -> None:
    """The same traffic plainly and with drafting: at least the same blocks are found, also where an answer ends inside
    an accepted run.
    """
    check_hit_rate(folders, name, plain_traffic)


def check_hit_rate(folders: dict[str, Path], name: str, plain_traffic: tuple[list[list[int]], PrefixStats]) -> None:
    """The traffic with drafts of `name` finds what the plain one finds."""
    (expected, plain), (answers, speculative) = plain_traffic, traffic(folders, name)
    assert answers == expected
    assert plain.num_evicted_blocks == speculative.num_evicted_blocks == 0
    assert speculative.num_looked_up_tokens == plain.num_looked_up_tokens
    assert speculative.num_found_tokens >= plain.num_found_tokens > 300


def test_every_drafter_is_compared() -> None:
    choices = {"auto"}  # among other drafters, each of which is here
    compared = set(CASES) - set(ALIKE)
    assert set(DRAFTERS) - choices == {case.split(":")[0].split("/")[0] for case in compared}
    assert set(ALIKE) < set(CASES)


@pytest.mark.parametrize("name", some_of(["recycling", "early_exit"], {"recycling"}))
def test_a_full_cache_finds_as_much_but_for_its_oldest_block(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft tokens in front of a block's border take the block unused longest a little before the text would; if the
    answer ends there, for nothing.
    """
    found, lengths = [], []
    for spec in (SpecConfig(), spec_of(name, folders["draft"], num_draft=8)):
        with LLM(folders["target"], SpecConfig(), dtype="float32", cache_tokens=384) as llm:
            monkeypatch.setattr(llm.engine.admission, "eos_token_ids", frozenset(range(0, COLUMNS, 13)))
            lengths.append([])
            for i in range(40):
                prompt = [*token_ids(70, 355, seed=i * i % 5), *token_ids(1 + i, 355, seed=50 + i)]
                lengths[-1].append(len(llm.generate([prompt], SamplingParams(max_tokens=40), spec)[0].token_ids))
            stats = llm.stats.prefix
            assert stats is not None
            assert stats.num_evicted_blocks > 0
            found.append(stats.num_found_tokens)
    assert lengths[0] == lengths[1]
    assert min(lengths[0]) < 40
    assert found[1] >= 0.97 * found[0] > 0
