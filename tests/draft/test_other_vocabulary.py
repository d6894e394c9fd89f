"""A draft model with another tokenizer changes nothing but the speed: exact distributions, equal texts, and drafts
that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Written
from tokenizers import decoders, models
from torch import Tensor

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.engine.engine import Engine
from foretoken.errors import DrafterWarning
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.processors import RequestProcessors
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from foretoken.text.vocabulary import Side
from foretoken.verify import RULES
from tests.helpers import distribution
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer, token_ids
from tests.helpers.enumeration import (
    EXACT,
    Choice,
    DraftToken,
    RandomTables,
    cases_of,
    complete,
    emitted_law,
    joint,
    max_error,
)
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer
from tests.helpers.scripted import ScriptedModel
from tests.helpers.watch import Watched, check_cache

COLUMNS = 400
FOREIGN = ("sentencepiece", "unigram", "wordpiece")
LONG = SamplingParams(max_tokens=24, ignore_eos=True)
PROMPTS = [
    *(
        "the cat sat on the",
        "for i in range(10):\n    pri",
        "für naïve 猫 😀 schön",
        " ",
        "x",
        "the dog ran to the house, then it was",
    ),
    *(token_ids(1 + 2 * i, 355, seed=i) for i in range(6)),
    *([0, 0, 5], [399], [390, 20, 30], token_ids(30, 355, seed=3) * 3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with byte-level tokens and drafts with tokens of other kinds; all have columns beyond their tokens."""
    folder = tmp_path_factory.mktemp("foreign")
    for seed, kind in enumerate(("bytes", *FOREIGN)):
        tiny_checkpoint(
            folder / kind,
            "llama",
            seed,
            num_hidden_layers=2 if kind == "bytes" else 1,
            hidden_size=32,
            vocab_size=COLUMNS,
        )
        tiny_tokenizer(folder / kind, COLUMNS, PROSE) if kind == "bytes" else foreign_tokenizer(folder / kind, kind)
    return {kind: folder / kind for kind in ("bytes", *FOREIGN)}


@pytest.fixture(scope="module")
def foreign(folders: dict[str, Path]) -> LLM:
    return LLM(folders["bytes"], dtype="float32", cache_tokens=8192)


def specs_of(folders: dict[str, Path], **options: object) -> list[SpecConfig]:
    """Every kind of draft, every way there is."""
    pairs = [
        (kind, how)
        for kind in FOREIGN
        for how in ("auto", "strings", "intersection")
        if (kind, how) != ("wordpiece", "intersection")
    ]
    return [SpecConfig("draft_model", str(folders[kind]), draft_vocabulary=how, **options) for kind, how in pairs]


@pytest.fixture
def watched(foreign: LLM, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The drafters of the engine, every call checked, the state after every round too."""
    watchers = []
    for spec in specs_of(folders):
        foreign.prepare(spec)
        key = drafter_key(spec)
        watchers.append(Watched(foreign._drafters.drafters[key], COLUMNS))
        monkeypatch.setitem(foreign._drafters.drafters, key, watchers[-1])
    return watchers


pytestmark = pytest.mark.filterwarnings("ignore:draft .* has another tokenizer", "ignore:the draft has")


# Each number in each batch: proof/test_other_vocabulary.py.
@pytest.mark.parametrize(("num_draft", "batch"), [(1, 16), (8, 1)])
def test_greedy_equals_plain(
    foreign: LLM, folders: dict[str, Path], watched: list[Watched], num_draft: int, batch: int
) -> None:
    """In batches that mix the ways, the drafts and plain requests; prompts as text and as ids, with tokens that write
    nothing.
    """
    plain = [foreign.generate([prompt], LONG)[0].token_ids for prompt in PROMPTS]
    specs = [*specs_of(folders, num_draft=num_draft), SpecConfig()]
    for start in range(0, len(PROMPTS), batch):
        chosen = range(start, start + batch)
        outputs = foreign.generate([PROMPTS[i] for i in chosen], LONG, [specs[i % len(specs)] for i in chosen])
        assert [out.token_ids for out in outputs] == [plain[i] for i in chosen]
    assert all((one.num_drafted > 0) == (num_draft > 0) for one in watched)


def test_the_text_of_a_seed_is_the_plain_text(foreign: LLM, folders: dict[str, Path], watched: list[Watched]) -> None:
    """Under the coupled rule; with penalties, bans and filters that speak of target tokens, drafting less too."""
    values: list[dict] = [
        {},
        {"top_p": 0.9},
        {"frequency_penalty": 0.8, "repetition_penalty": 1.3},
        {"bad_words": ([40], [50, 60]), "min_tokens": 5},
    ]
    each = [
        replace(LONG, temperature=(0.6, 1.0)[i % 2], seed=i, ignore_eos=i % 5 > 0, **values[i % 4])
        for i in range(len(PROMPTS))
    ]
    plain = [foreign.generate([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, each, strict=True)]
    specs = [
        *specs_of(folders, num_draft=4),
        *specs_of(folders, num_draft=5, draft_probability=0.7, min_confidence=0.01, draft_top_k=50),
    ]
    accepted = 0
    for turn in range(3):
        outputs = foreign.generate(PROMPTS, each, [specs[(turn + i) % len(specs)] for i in range(len(PROMPTS))])
        assert [out.token_ids for out in outputs] == plain
        accepted += sum(out.stats.num_accepted for out in outputs)
    assert accepted > 30


def test_sampled_requests_keep_the_contract(foreign: LLM, folders: dict[str, Path], watched: list[Watched]) -> None:
    params = [
        SamplingParams(max_tokens=16, temperature=(0.5, 1.0)[i % 2], top_k=(0, 9)[i // 2 % 2])
        for i in range(len(PROMPTS))
    ]
    for spec in specs_of(folders, num_draft=4, rule="block"):
        foreign.generate(PROMPTS, params, spec)
    assert all(one.num_drafted > 0 for one in watched)


def test_the_draft_cache_holds_the_text(foreign: LLM, folders: dict[str, Path], watched: list[Watched]) -> None:
    """After every step the draft's cache is what a fresh run over its own tokens of the text would write."""

    num_checked = 0

    def audit(_: object) -> None:
        nonlocal num_checked
        for one in watched:
            for sequence in one.texts:
                check_cache(one.inner.model, sequence, one.inner._cached[sequence])
                num_checked += 1

    each = [replace(LONG, temperature=(0.0, 1.0)[i % 2], seed=i) for i in range(len(PROMPTS))]
    specs = specs_of(folders, num_draft=4)
    foreign.generate(PROMPTS, each, [specs[i % len(specs)] for i in range(len(PROMPTS))], on_step=audit)
    assert num_checked > len(PROMPTS)


@pytest.mark.parametrize("slots", [4, 40, 120])
def test_a_draft_without_room_or_context_drafts_less(
    folders: dict[str, Path], foreign: LLM, slots: int, tmp_path: Path
) -> None:
    """The draft's cache is small, and its context ends before the target's."""
    tiny_checkpoint(
        tmp_path, "llama", num_hidden_layers=1, hidden_size=32, vocab_size=COLUMNS, max_position_embeddings=20
    )
    plain = [out.token_ids for out in foreign.generate(PROMPTS[:8], LONG)]
    for how in ("strings", "intersection"):
        sides = [Side(load_tokenizer(folders[kind]), COLUMNS, ()) for kind in ("bytes", "sentencepiece")]
        drafter = Watched(OtherVocabularyDrafter(PagedModel(load_decoder(tmp_path), slots, 4), *sides, how), COLUMNS)
        spec = SpecConfig("draft_model", "d", draft_vocabulary=how, num_draft=4)
        target = PagedModel(load_decoder(folders["bytes"]), 4096, 16)
        drafters = DrafterGroup(target)
        drafters.drafters[drafter_key(spec)] = drafter
        engine = Engine(target, drafters)
        ids = [foreign.encode(prompt) if isinstance(prompt, str) else prompt for prompt in PROMPTS[:8]]
        states = [engine.submit(prompt, LONG, spec) for prompt in ids]
        while engine.has_work:
            engine.step()
        assert [tuple(state.output_ids) for state in states] == plain
        assert (drafter.num_drafted > 0) == (slots > 4)


# ---- distributions


def letters(folder: Path, tokens: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    folder.mkdir()
    written = Written(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    written.decoder = decoders.ByteLevel()
    written.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


class Float64Model(ScriptedModel):
    def _logits(self, context: tuple[int, ...]) -> Tensor:
        return torch.tensor(self.script(context), dtype=torch.float64)


@pytest.mark.parametrize("rule", ["rejection", "block", "tree", "traversal"])
@pytest.mark.parametrize(
    "options", [{}, {"draft_probability": 0.6}, {"min_confidence": 0.4}, {"draft_top_k": 2}], ids=str
)
def test_exact_law_by_enumeration(rule: str, options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft of two tokens, with the real drafter asked for its choices: the emitted distribution is the target's
    to 1e-12.

    Target tokens a b c d; the draft has a b c, too, in another order, merges ab, and one token that the target lacks.
    """
    target, draft = letters(tmp_path / "t", "abcd"), letters(tmp_path / "d", ["z", "c", "a", "ab", "b"], [("a", "b")])
    said = RandomTables(5, seed=7)
    model = Float64Model(lambda context: np.log(said[context] + 1e-9).tolist(), 5)
    drafter = OtherVocabularyDrafter(model, Side(target, 4, ()), Side(draft, 5, ()), "intersection")
    assert drafter.shared == {0: 2, 1: 4, 2: 1}
    spec = SpecConfig("draft_model", "d", num_draft=2, **options)
    params = SamplingParams(temperature=1.0)

    def draw(choice: Choice, context: tuple[int, ...]) -> tuple[DraftToken, ...]:
        monkeypatch.setattr(
            "foretoken.draft.chain.draw",
            lambda distributions, u: torch.tensor([choice.pick(distributions[0].tolist())]),
        )
        coin = lambda *_: np.array([0.0 if choice.coin(0.6) else 0.9])  # noqa: E731
        monkeypatch.setattr(
            "foretoken.draft.chain.uniforms",
            lambda seeds, purpose, *_: coin() if purpose.name == "COIN" else np.zeros(1),
        )
        prompt = (0, 1, *context)
        request = Request(1, prompt, params, spec, 0)
        drafter.start(request)
        entry = BatchEntry(
            request, len(prompt) - 1, prompt[-1:], True, 2, draft_probability=options.get("draft_probability", 1.0)
        )
        found = drafter.propose(Batch((entry,)))
        drafter.finish(1)
        rows = (
            []
            if found.mass is None
            else [found.mass.distributions[r].numpy() if r >= 0 else None for r in found.mass.distribution_of_row]
        )
        draft_tokens = [DraftToken(token, mu) for token, mu in zip(found.tokens.tolist(), rows, strict=False)]
        open_mass = rows[len(draft_tokens)] if len(rows) > len(draft_tokens) else None
        return (*draft_tokens, *([] if open_mass is None else [DraftToken(None, open_mass)]))

    tables = RandomTables(4, seed=1)
    for contexts in ({(): 1.0}, {(0,): 0.5, (3,): 0.3, (2, 0): 0.2}):
        cases = cases_of(draw, contexts)
        assert sum(case.weight for case in cases) == pytest.approx(1, abs=1e-12)
        assert len(cases) >= 3
        emitted = complete(emitted_law(RULES[rule], cases, tables), tables, 5)
        whole = {
            text: contexts[head] * weight for head in contexts for text, weight in continued(tables, head, 5).items()
        }
        assert max_error(emitted, whole) < EXACT


def continued(tables: RandomTables, head: tuple[int, ...], length: int) -> dict[tuple[int, ...], float]:
    return joint(tables, length) if not head else complete({head: 1.0}, tables, length)


def test_moved_laws_are_the_drafts_own_over_the_shared_tokens(tmp_path: Path) -> None:
    """Renormalised, in the target's ids, after bias and bans on these; a ban on all of them leaves the request
    alive.
    """
    target, draft = letters(tmp_path / "t", "abcd"), letters(tmp_path / "d", ["z", "c", "a", "ab", "b"])
    own = np.array([0.3, 0.2, 0.1, 0.3, 0.1])
    drafter = OtherVocabularyDrafter(
        Float64Model(lambda _: np.log(own).tolist(), 5), Side(target, 4, ()), Side(draft, 5, ())
    )
    for banned, bias, expected in (
        ((), {}, [0.1, 0.1, 0.2, 0.0]),
        ((2,), {0: float(np.log(3))}, [0.3, 0.1, 0.0, 0.0]),
        (
            (0, 1, 2),
            {},
            [0.1, 0.1, 0.2, 0.0],
        ),  # only d is left, which the draft cannot say: any draft token will do, it is refused
    ):
        params = SamplingParams(temperature=1.0, logit_bias=bias, bad_words=tuple((token,) for token in banned))
        processors = RequestProcessors(params, (0,), 4, (), {(token,) for token in banned})
        request = Request(1, (0,), params, SpecConfig("draft_model", "d"), 5)
        drafter.start(request)
        found = drafter.propose(Batch((BatchEntry(request, 0, (0,), True, 1, processors),)))
        drafter.finish(1)
        assert found.mass is not None
        np.testing.assert_allclose(
            found.mass.distributions[0].numpy(), np.array(expected) / np.sum(expected), atol=1e-12
        )
        processors.commit((3,))
        assert processors.error is None


# By chi-square, for half of these: the others in proof/test_law.py.
LAWS = [
    (how, values)
    for values in ({"frequency_penalty": 0.6, "logit_bias": {2: 0.5}, "top_p": 0.9}, {})
    for how in ("strings", "intersection")
]


@pytest.mark.repeated
def test_sampled_answers_have_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed_drafters: list[str]
) -> None:
    """Both ways, with and without processors."""
    check_laws(tmp_path, monkeypatch, failed_drafters, [LAWS[0], LAWS[3]])


def check_laws(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failed_drafters: list[str],
    groups: Sequence[tuple[str, dict[str, Any]]],
) -> None:
    """By chi-square through the engine: all rules, mixed batches; and the test sees a distribution that was not moved
    rightly.
    """
    narrow = distribution.narrow_models(tmp_path / "target")
    shape = {
        "vocab_size": 6,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = load_decoder(tiny_checkpoint(tmp_path / "draft", "llama", 5, **shape, num_key_value_heads=1))
    target = letters(tmp_path / "t", "abcde")
    draft = letters(tmp_path / "d", ["x", "c", "a", "ab", "b", "d"], [("a", "b")])
    made = distribution.narrow_engine

    def engine(*_: object) -> Engine:
        one = made(narrow)
        for how in ("strings", "intersection"):
            paged = PagedModel(model, distribution.NUM_SLOTS, 16)
            drafter = OtherVocabularyDrafter(paged, Side(target, 5, ()), Side(draft, 6, ()), how)
            one.drafters.drafters[drafter_key(SpecConfig("draft_model", "d", draft_vocabulary=how))] = drafter
        return one

    monkeypatch.setattr(distribution, "narrow_engine", engine)
    base, count = SamplingParams(max_tokens=distribution.LENGTH + 3, temperature=1.0, ignore_eos=True), 800
    rules = ("block", "rejection", "tree", "traversal", "coupled")
    asked = []
    for how, values in groups:
        specs = [
            SpecConfig("draft_model", "d", draft_vocabulary=how, num_draft=1 + i % 4, rule=rules[i % 5])
            for i in range(count)
        ]
        asked += [(replace(base, seed=seed, **values), spec) for seed, spec in enumerate(specs)]
    order = np.random.default_rng(0).permutation(len(asked))
    answers = np.empty((len(asked), distribution.LENGTH), dtype=np.int64)
    answers[order] = distribution.sample_answers(narrow, [asked[i] for i in order])
    for (how, values), part in zip(groups, np.split(answers, len(groups)), strict=True):
        assert (
            min(distribution.p_values(part, distribution.exact_law(narrow, replace(base, **values))))
            > distribution.ALARM
        ), (how, values)

    monkeypatch.setattr(OtherVocabularyDrafter, "_moved", lambda self, logits: logits[:, [1, 2, 4, 5, 3]])
    broken = [
        (
            replace(base, seed=seed),
            SpecConfig("draft_model", "d", draft_vocabulary="intersection", num_draft=3, rule="block"),
        )
        for seed in range(20)
    ]
    assert not failed_drafters
    with pytest.warns(DrafterWarning, match="KeyError"):  # a draft token outside the shared tokens cannot be fed back
        distribution.sample_answers(narrow, broken)
    assert set(failed_drafters) == {"draft_model: KeyError: 4"}
