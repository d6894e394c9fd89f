"""Padded batches answer as the engine does, whatever the rows accept, and their caches hold what they should."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, ConfigError, InputError, SamplingParams
from foretoken.draft.base import Drafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.suffix import SuffixDrafter
from foretoken.model.interface import LanguageModel
from foretoken.model.loader import load_decoder
from foretoken.model.open import open_model
from foretoken.model.paged import PagedModel
from studies.layouts import padded_cache
from studies.layouts.padded import PaddedDecoder, PaddedRun, accepted_of, choose_batch
from studies.layouts.padded_cache import PaddedCache, PooledCache, PublishedCache, in_place
from studies.layouts.padded_draft import Row
from studies.layouts.padded_model import PaddedModel
from tests.helpers.checkpoints import tiny_checkpoint, token_ids, variant

LENGTHS = (3, 17, 9, 40, 9, 1, 26, 17, 5, 33)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Every other one repeats itself, so that a lookup finds something in some rows and nothing in others."""
    found = []
    for number, length in enumerate(lengths):
        ids = token_ids(length, seed=number)
        found.append((ids[:3] * length)[:length] if number % 2 else ids)
    return found


@pytest.fixture(scope="module")
def draft(pair: SimpleNamespace) -> LanguageModel:
    return open_model(pair.draft, "float32", "cpu", 4096)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> tuple[tuple[int, ...], ...]:
    """What the engine answers, request by request."""
    return answers(llm, prompts(), PARAMS)


def answers(llm: LLM, texts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(out.token_ids) for text in texts for out in llm.generate([text], params))


def drafter(name: str | None, draft: LanguageModel) -> Drafter | None:
    return {None: None, "ngram": NgramDrafter(), "draft_model": DraftModelDrafter(draft)}[name]


KINDS = {"eqspec": {}, "published": {"published": True}, "exspec4": {"window": 4}, "exspec7": {"window": 7}}
MODES = [
    pytest.param(name, options, id=f"{name or 'plain'}-{kind}")
    for name, (kind, options) in itertools.product((None, "ngram", "draft_model"), KINDS.items())
]


@pytest.mark.parametrize(("name", "options"), MODES)
def test_padded_answers_are_the_engines(
    llm: LLM, draft: LanguageModel, expected: tuple[tuple[int, ...], ...], name: str | None, options: dict[str, Any]
):
    """Uneven prompts, rows without a draft beside rows with one, rows that finish in different rounds."""
    run = PaddedDecoder(llm.target, drafter(name, draft), 4 if name else 0, 4, **options).generate(prompts(), PARAMS)
    assert run.answers == expected
    assert run.num_emitted == len(LENGTHS) * 23  # the first token of each came with its prompt
    if name is None:
        assert run.num_drafted == 0
    else:
        assert 0 < run.num_accepted < run.num_drafted
        assert run.num_rounds < run.num_emitted


@pytest.mark.parametrize(
    "shape", ["llama-mqa", "llama-mha", "mistral-sliding", "qwen2-layer-types", "qwen3", "llama-llama3"]
)
@pytest.mark.parametrize("options", [{}, {"published": True}, {"window": 5}], ids=["eqspec", "published", "exspec"])
def test_every_kind_of_layer(tmp_path: Path, shape: str, options: dict[str, Any]):
    """Grouped heads, windows of attention, norms of heads, scaled positions."""
    with LLM(variant(tmp_path, shape), dtype="float32", cache_tokens=4096) as llm:
        texts = prompts((6, 19, 2, 11, 19))
        self_draft = DraftModelDrafter(open_model(tmp_path, "float32", "cpu", 4096))
        for one in (NgramDrafter(), self_draft):
            run = PaddedDecoder(llm.target, one, 3, 3, **options).generate(texts, PARAMS)
            assert run.answers == answers(llm, texts, PARAMS)
        assert (
            run.num_accepted == run.num_drafted > 0
        )  # the target drafts for itself: every row runs its last two tokens


@pytest.mark.parametrize(("name", "options"), MODES)
def test_end_tokens_in_the_middle_of_a_draft(
    llm: LLM, draft: LanguageModel, expected: tuple[tuple[int, ...], ...], name: str | None, options: dict[str, Any]
):
    """Every answer is cut at the first of its end tokens, and no other row notices."""
    eos = {answer[5] for answer in expected[::2]} | {expected[1][0]}
    cut = [
        next((answer[: place + 1] for place, token in enumerate(answer) if token in eos), answer) for answer in expected
    ]
    assert len({len(answer) for answer in cut}) > 3
    params = SamplingParams(max_tokens=24)
    run = PaddedDecoder(llm.target, drafter(name, draft), 4 if name else 0, 4, **options).generate(
        prompts(), params, tuple(eos)
    )
    assert list(run.answers) == cut


@pytest.mark.parametrize("window", [None, 6])
def test_the_cache_grows(llm: LLM, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch, window: int | None):
    """From two columns on, many times over, up to the end of the context."""
    monkeypatch.setattr(padded_cache, "_FIRST_COLUMNS", 2)
    texts, params = prompts((2, 240, 4, 3, 150, 9)), SamplingParams(max_tokens=300, ignore_eos=True)
    run = PaddedDecoder(llm.target, DraftModelDrafter(draft), 5, 3, window).generate(texts, params)
    assert run.answers == answers(llm, texts, params)
    assert {len(text) + len(answer) for text, answer in zip(texts, run.answers, strict=True)} == {256}


def columns(cache: PaddedCache, row: int) -> torch.Tensor:
    """Keys and values of a row's real tokens, `[layers, 2, G, l, K]`."""
    return torch.stack([layer[:, row, :, cache.pads[row] : cache.width] for layer in cache.layers])


def ways(llm: LLM) -> Iterator[PaddedCache]:
    assert isinstance(llm.target, PagedModel)
    config, device = llm.target.config, torch.device("cpu")
    yield PaddedCache(config, torch.float32, device)
    yield PublishedCache(config, torch.float32, device)
    yield PooledCache(config, torch.float32, device, 8)


def test_what_is_realigned_equals_what_is_computed_anew(llm: LLM):
    """Rounds of random acceptance, rows leaving on the way: after each the cache is that of the kept tokens read from
    scratch.
    """
    assert isinstance(llm.target, PagedModel)
    for cache in ways(llm):
        chance = random.Random(0)
        model = PaddedModel(llm.target.decoder, cache)
        texts = dict(enumerate(prompts((5, 12, 1, 8, 20))))
        model.read_prompts(list(texts), list(texts.values()), 1)
        for turn in range(12):
            if turn in (3, 7, 8):
                gone = chance.choice(list(texts))
                del texts[gone]
                cache.end(gone)
            sequences = in_place(cache.sequences, list(texts))
            moved = model.align(sequences, [len(texts[sequence]) for sequence in sequences])
            assert moved <= len(sequences)
            assert cache.width == max(map(len, texts.values()))
            for row, sequence in enumerate(sequences):
                assert cache.width - cache.pads[row] == len(texts[sequence])
                fresh = PaddedModel(llm.target.decoder, PaddedCache(cache.config, torch.float32, cache.device))
                fresh.read_prompts([0], [texts[sequence]], 0)
                torch.testing.assert_close(columns(cache, row), columns(fresh.cache, 0), rtol=1e-4, atol=1e-5)
            new = [token_ids(4, seed=100 * turn + row) for row in range(len(sequences))]
            model.forward(torch.tensor(new), 1)
            for sequence, ids in zip(sequences, new, strict=True):
                texts[sequence] = [*texts[sequence], *ids[: chance.randint(1, 4)]]


def test_rows_that_grow_alike_stay_where_they_are(llm: LLM):
    """Plain decoding in a padded batch moves nothing while nobody leaves."""
    run = PaddedDecoder(llm.target, None, 0, 4).generate(prompts()[:4], PARAMS)
    assert (run.num_rounds, run.num_moved) == (23, 0)


def test_a_finished_row_leaves_unless_it_is_as_published(llm: LLM, expected: tuple[tuple[int, ...], ...]):
    """The published target runs it to the end of the batch: in every round it copies all rows."""
    params, eos = SamplingParams(max_tokens=24), (expected[0][4],)
    well = PaddedDecoder(llm.target, None, 0, 4).generate(prompts()[:4], params, eos)
    published = PaddedDecoder(llm.target, None, 0, 4, published=True).generate(prompts()[:4], params, eos)
    assert well.answers == published.answers
    assert len(well.answers[0]) == 5 < max(map(len, well.answers))
    assert published.num_moved == 4 * published.num_rounds == 4 * well.num_rounds
    assert well.num_moved < published.num_rounds


def test_a_pool_of_equal_lengths_needs_no_alignment(llm: LLM):
    """A whole pool in one group, plain: what is in the batch stays there."""
    run = PaddedDecoder(llm.target, None, 0, 4, 4).generate(prompts((9, 9, 9, 9)), PARAMS)
    assert (run.num_rounds, run.num_grouped, run.num_moved) == (23, 23, 0)


def row(number: int, length: int) -> Row:
    return Row(number, [1] * length, 1, 99, frozenset())


def test_the_choice_of_a_batch():
    """The first length that fills a batch; without one the first of the window; the last few rows are a group when they
    are equal.
    """

    def chosen(lengths: Sequence[int], size: int) -> tuple[list[int], bool]:
        rows, grouped = choose_batch([row(number, length) for number, length in enumerate(lengths)], size)
        return [one.number for one in rows], grouped

    assert chosen((5, 7, 6, 7, 5, 7), 3) == ([1, 3, 5], True)
    assert chosen((5, 7, 6, 7, 5, 7), 2) == ([1, 3], True)
    assert chosen((5, 7, 6, 8, 4), 2) == ([0, 1], False)
    assert chosen((5, 5), 3) == ([0, 1], True)
    assert chosen((5, 6), 3) == ([0, 1], False)


def test_who_has_a_row_keeps_it():
    assert in_place([4, 5, 6, 7], [4, 6, 7]) == [4, 7, 6]
    assert in_place([4, 5, 6], [9, 8, 6]) == [9, 8, 6]
    assert in_place([], [2, 1]) == [2, 1]


def test_accepted_up_to_the_first_difference():
    assert accepted_of((1, 2, 3), [1, 2, 3, 9]) == (1, 2, 3)
    assert accepted_of((1, 2, 3), [1, 7, 3, 9]) == (1,)
    assert accepted_of((), [5]) == ()


def test_times_and_counts_add_up(llm: LLM, draft: LanguageModel):
    """Every part of a run has its seconds."""
    run: PaddedRun = PaddedDecoder(llm.target, DraftModelDrafter(draft), 4, 4).generate(prompts(), PARAMS)
    clock = run.clock
    assert min(clock.prompt_s, clock.forward_s, clock.realign_s, clock.draft_s, clock.rest_s) > 0
    assert run.num_moved > 0


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_parameters_that_it_does_not_know_are_refused(llm: LLM, changed: dict[str, object], field: str):
    with pytest.raises(InputError, match=f"^{field}="):
        PaddedDecoder(llm.target, None, 0, 2).generate([[1, 2]], SamplingParams(**changed))


def test_what_cannot_run_in_this_layout_is_refused(llm: LLM, draft: LanguageModel, tmp_path: Path):
    with pytest.raises(ConfigError, match="drafter='suffix'"):
        PaddedDecoder(llm.target, SuffixDrafter(), 3, 2)
    with pytest.raises(ConfigError, match="num_draft=0"):
        PaddedDecoder(llm.target, NgramDrafter(), 0, 2)
    with pytest.raises(ConfigError, match="num_draft=3"):
        PaddedDecoder(llm.target, None, 3, 2)
    with pytest.raises(ConfigError, match="batch_size=0"):
        PaddedDecoder(llm.target, None, 0, 0)
    with pytest.raises(ConfigError, match="window=3"):
        PaddedDecoder(llm.target, None, 0, 4, 3)
    with pytest.raises(ConfigError, match="published=True"):
        PaddedDecoder(llm.target, None, 0, 2, 4, published=True)
    with pytest.raises(ConfigError, match="target='TransformersModel'"):
        PaddedDecoder(open_model(tiny_checkpoint(tmp_path / "neox", "gpt_neox")), None, 0, 2)
    with pytest.raises(InputError, match="prompt="):
        PaddedDecoder(llm.target, None, 0, 2).generate([[]], PARAMS)
    short = PagedModel(load_decoder(tiny_checkpoint(tmp_path / "short", "llama", max_position_embeddings=16)), 512)
    with pytest.raises(InputError, match="max_tokens=24: the draft's context"):
        PaddedDecoder(llm.target, DraftModelDrafter(short), 3, 2).generate(prompts(), PARAMS)
