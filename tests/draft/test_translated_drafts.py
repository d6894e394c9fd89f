"""Drafts of another vocabulary: which draft tokens are kept, which way is taken, which pairs are refused."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken import LLM, ConfigError, MismatchError, SamplingParams, SpecConfig
from foretoken.core import Batch, BatchEntry, Request
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup, drafter_key
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.engine.engine import Engine
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from foretoken.text.vocabulary import Side, spellings
from tests.draft.test_other_vocabulary import COLUMNS, LONG, PROMPTS, folders, foreign
from tests.helpers.checkpoints import tiny_checkpoint, tiny_tokenizer
from tests.helpers.foreign_tokenizers import PROSE
from tests.helpers.scripted import ScriptedModel
from tests.helpers.usual import some_of
from tests.helpers.watch import Watched

__all__ = ["folders", "foreign"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:draft .* has another tokenizer", "ignore:the draft has")


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


@pytest.mark.parametrize("how", some_of(["auto", "same"], ["auto"]))
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
