"""A draft model with another tokenizer changes nothing but the speed: exact distributions, equal texts, and drafts
that are kept.
"""

from __future__ import annotations

import re
import warnings
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

from foretoken import LLM, ConfigError, MismatchError, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.engine.engine import Engine
from foretoken.errors import DrafterWarning
from foretoken.model.loader import load_decoder
from foretoken.model.paged import PagedModel
from foretoken.text.processors import RequestProcessors
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from foretoken.text.vocabulary import Side, spellings
from foretoken.verify import RULES
from tests.helpers import distribution
from tests.helpers.checkpoints import PROSE, foreign_tokenizer, tiny_checkpoint, tiny_tokenizer, token_ids
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
            "foretoken.draft.chain.sample",
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


# ---- draft tokens that are kept


class Reader(ScriptedModel):
    """A model that reads a text out, in its own tokens: after any part of it the token that the tokenizer itself would
    use next.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, eos: int) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        writes = tokenizer.token_bytes
        assert writes is not None
        lead = len(b"".join(writes[token] for token in ids)) - len(text.encode())

        def script(context: tuple[int, ...]) -> list[float]:
            said = b"".join(writes[token] for token in context if token not in tokenizer.special_ids)
            whole = b" " * lead + text.encode()
            assert whole.startswith(said) or whole[lead:].startswith(said), "the model was told another text"
            rest = whole[len(said) if whole.startswith(said) else len(said) + lead :]
            logits = [-20.0] * COLUMNS
            for token, written in writes.items():
                if written and rest.startswith(written) and token not in tokenizer.special_ids:
                    logits[token] = 10.0 * len(written)
            place = 0
            for token in ids:
                if place == len(whole) - len(rest):
                    logits[token] = 1000.0
                place += len(writes[token])
            if not rest:
                logits[eos] = 1000.0
            return logits

        super().__init__(script, COLUMNS, (eos,))


AGREEING = [
    *(
        ("strings", *pair)
        for pair in (("bytes", "sentencepiece"), ("sentencepiece", "bytes"), ("unigram", "bytes"), ("bytes", "unigram"))
    ),
    *(("intersection", *pair) for pair in (("bytes", "sentencepiece"), ("sentencepiece", "bytes"))),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("how", "one", "other"), AGREEING)
def test_models_that_say_the_same_text_agree(
    folders: dict[str, Path], how: str, one: str, other: str, temperature: float
) -> None:
    """Nearly all of the draft tokens are kept, the end of the text included; all of them where every word is a
    shared token.
    """
    target, draft = load_tokenizer(folders[one]), load_tokenizer(folders[other])
    assert target is not None
    assert draft is not None
    sides = [Side(tokenizer, COLUMNS, (tokenizer.eos_token_id,)) for tokenizer in (target, draft)]
    text = "the cat sat on the mat and the dog ran to the house"
    if how == "intersection":
        text = "the" + " cat sat on the dog ran the cat and the dog sat on the cat" * 2
    elif "unigram" not in (one, other):
        text += ", then it was late. für naïve 猫 😀 schön in range(10): return self.name"
    drafter = OtherVocabularyDrafter(Reader(draft, text, draft.eos_token_id), *sides, how)
    spec = SpecConfig("draft_model", "d", draft_vocabulary=how, num_draft=12 if other == "unigram" else 5)
    reader = Reader(target, text, target.eos_token_id)
    drafters = DrafterGroup(reader)
    drafters.drafters[drafter_key(spec)] = Watched(drafter, COLUMNS)
    engine = Engine(reader, drafters)
    prompt = target.encode(text)[:4]
    state = engine.submit(prompt, SamplingParams(max_tokens=200, temperature=temperature), spec)
    while engine.has_work:
        engine.step()
    assert state.output_ids == [*target.encode(text)[4:], target.eos_token_id]
    assert state.stats.num_accepted >= 0.9 * state.stats.num_drafted
    assert state.stats.num_steps < 0.5 * len(state.output_ids)


def test_the_end_of_text_goes_over(folders: dict[str, Path]) -> None:
    """A draft that ends the text drafts the target's end, in both ways, and nothing behind it."""
    target, draft = load_tokenizer(folders["bytes"]), load_tokenizer(folders["sentencepiece"])
    assert target is not None
    assert draft is not None
    sides = [Side(tokenizer, COLUMNS, (tokenizer.eos_token_id,)) for tokenizer in (target, draft)]
    for how in ("strings", "intersection"):
        drafter = OtherVocabularyDrafter(Reader(draft, "the cat sat", draft.eos_token_id), *sides, how)
        request = Request(1, tuple(target.encode("the cat")), LONG, SpecConfig("draft_model", "d"), 1)
        drafter.start(request)
        found = drafter.propose(
            Batch((BatchEntry(request, len(request.prompt_ids) - 1, request.prompt_ids[-1:], True, 6),))
        )
        drafter.finish(1)
        assert found.tokens.tolist()[:2] == [*target.encode(" sat"), target.eos_token_id]
        assert how == "intersection" or found.num_nodes == 2


def test_inside_a_character_shared_tokens_wait_and_text_does_not(folders: dict[str, Path]) -> None:
    """The committed text ends with the first of the four bytes of 😀."""
    target, draft = load_tokenizer(folders["bytes"]), load_tokenizer(folders["sentencepiece"])
    assert target is not None
    assert draft is not None
    sides = [Side(tokenizer, COLUMNS, ()) for tokenizer in (target, draft)]
    first = spellings(sides[0])["😀".encode()[:1]]
    for how in ("strings", "intersection"):
        drafter = OtherVocabularyDrafter(Reader(draft, "the cat😀 sat", draft.eos_token_id), *sides, how)
        request = Request(1, (*target.encode("the cat"), first), LONG, SpecConfig("draft_model", "d"), 1)
        drafter.start(request)
        found = drafter.propose(
            Batch((BatchEntry(request, len(request.prompt_ids) - 1, request.prompt_ids[-1:], True, 6),))
        )
        drafter.finish(1)
        written = target.decode([*request.prompt_ids, *found.tokens.tolist()])
        assert written.startswith("the cat😀 sat") if how == "strings" else not found.num_nodes


# ---- which way is taken


def test_auto_says_once_what_it_does(folders: dict[str, Path]) -> None:
    """Greedy requests go by text, sampled ones by shared tokens; one warning per drafter."""
    with LLM(folders["bytes"], dtype="float32", cache_tokens=1024) as llm:
        spec = SpecConfig("draft_model", str(folders["sentencepiece"]), num_draft=3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            llm.generate([PROMPTS[0]] * 2, [LONG, replace(LONG, temperature=1.0)], spec)
            llm.generate([PROMPTS[1]], LONG, spec)
        (said,) = [str(one.message) for one in caught if "tokenizer" in str(one.message)]
        assert re.search(r"another tokenizer .*'strings'.*317 tokens that both have \('intersection'\)", said)
        drafter = llm._drafters.drafters[drafter_key(spec)]
        assert isinstance(drafter, OtherVocabularyDrafter)
        assert drafter.name == "draft_model"
        for temperature, shared in ((0.0, False), (1.0, True)):
            request = Request(7, (90,), replace(LONG, temperature=temperature), spec, 1)
            drafter.start(request)
            assert drafter._begin(BatchEntry(request, 0, (90,), True, 2)).shared is shared
            drafter.finish(7)


def test_pairs_that_cannot_be_translated_are_refused(folders: dict[str, Path], foreign: LLM, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "mute", "llama", num_hidden_layers=1, hidden_size=32, vocab_size=COLUMNS)
    tiny_checkpoint(tmp_path / "small", "llama", num_hidden_layers=1, hidden_size=32, vocab_size=97)
    for name, how, words in (
        (
            tmp_path / "mute",
            "strings",
            "cannot be used with draft_vocabulary='strings', and the folder of the draft has no tokenizer",
        ),
        (
            tmp_path / "small",
            "auto",
            "a vocabulary of 97 tokens, the target one of 400 .*, and the folder of the draft has no tokenizer",
        ),
        (
            tmp_path / "small",
            "same",
            "a vocabulary of 97 tokens, the target one of 400 .*; choose a draft made for this target",
        ),
        (
            folders["unigram"],
            "same",
            "another tokenizer than the target: .*; choose a draft made for this target, or draft_vocabulary='auto'",
        ),
        (folders["wordpiece"], "intersection", "no tokens whose text is the same; use draft_vocabulary='strings'"),
    ):
        with pytest.raises(MismatchError, match=words) as caught:
            foreign.generate([[1]], LONG, SpecConfig("draft_model", str(name), draft_vocabulary=how))
        assert caught.value.exit_code == 3
        assert str(name) in str(caught.value)
    with (
        LLM(tmp_path / "mute", cache_tokens=256) as mute,
        pytest.raises(MismatchError, match="the folder of the target has no tokenizer"),
    ):
        mute.generate([[1]], LONG, SpecConfig("draft_model", str(folders["unigram"]), draft_vocabulary="intersection"))


@pytest.mark.parametrize("how", ["auto", "same"])
@pytest.mark.parametrize(("columns", "others"), [(400, 416), (416, 400)])
def test_padding_is_no_difference(tmp_path: Path, how: str, columns: int, others: int) -> None:
    """The same tokenizer, more or fewer columns behind its tokens: no translation, no warning; padding is never
    drafted.
    """
    for name, size, layers in (("target", columns, 2), ("draft", others, 1)):
        tiny_checkpoint(tmp_path / name, "llama", num_hidden_layers=layers, hidden_size=32, vocab_size=size)
        tiny_tokenizer(tmp_path / name, 400, PROSE)
    with LLM(tmp_path / "target", dtype="float32", cache_tokens=4096) as llm:
        prompts = [*PROMPTS[:8], [columns - 1, 5]]  # a prompt may hold padding that the draft lacks
        spec = SpecConfig("draft_model", str(tmp_path / "draft"), draft_vocabulary=how, num_draft=4)
        for params in (LONG, replace(LONG, temperature=1.0, seed=3)):
            plain = llm.generate(prompts, params)
            drafted = llm.generate(prompts, params, spec)
            assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
            assert all(out.stats.num_drafted > 0 for out in drafted)
        drafter = llm._drafters.drafters[drafter_key(spec)]
        assert isinstance(drafter, DraftModelDrafter)
        assert drafter.model.vocab_size == columns
        llm._drafters.drafters[drafter_key(spec)] = Watched(
            drafter, min(columns, others)
        )  # the ids that may be drafted
        llm.generate(prompts * 2, [replace(LONG, temperature=i % 2 * 1.0) for i in range(18)], spec)


def test_one_draft_for_each_use_of_its_vocabulary() -> None:
    keys = {
        drafter_key(SpecConfig("draft_model", "d", draft_vocabulary=how))
        for how in ("auto", "same", "strings", "intersection")
    }
    assert len(keys) == 4
    with pytest.raises(ConfigError, match="draft_vocabulary='other': choose one of auto, same, strings, intersection"):
        SpecConfig("draft_model", "d", draft_vocabulary="other")
    with pytest.raises(ConfigError, match="only drafter='draft_model' takes it"):
        SpecConfig("ngram", draft_vocabulary="strings")
