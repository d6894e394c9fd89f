"""Banned texts: exactly the tokens that would complete one are banned, at every drafted place, and none appears in an
answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest
import torch

from foretoken import LLM, InputError, SamplingParams, SpecConfig
from foretoken.text.bad_words import BannedTexts, TokenTexts, split_words
from foretoken.text.processors import RequestProcessors, make_processors
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer

VOCAB = 300
WORDS = [" ", "e", "return value", "é", "😀!", "ababa", "aab", "\n\n", "the list", END_OF_TEXT]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = load_tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("words"), VOCAB))
    assert loaded is not None
    return loaded


def banned(processors: RequestProcessors, path: tuple[int, ...]) -> set[int]:
    return set((processors.adjust(torch.zeros(2, VOCAB), [(), path])[1] == -torch.inf).nonzero().flatten().tolist())


def text_of(tokenizer: Tokenizer, ids: list[int] | tuple[int, ...]) -> bytes:
    written = tokenizer.token_bytes or {}
    return b"".join(b"" if token in tokenizer.special_ids else written[token] for token in ids)


@pytest.mark.parametrize("word", WORDS[:-1])
def test_w10_banned_is_exactly_what_would_complete_the_text(tokenizer: Tokenizer, word: str) -> None:
    """Against the definition, token by token, behind random committed texts and drafts that never contain the word."""
    rng, wanted = random.Random(word), word.encode()
    pieces = (
        tokenizer.encode(" ".join(WORDS[:-1]) + word[:-1])
        + [tokenizer.encode(c)[0] for c in "ab " + word]
        + sorted(tokenizer.special_ids)
    )
    processors = make_processors(SamplingParams(bad_words=[word]), tokenizer.encode(word), VOCAB, (), tokenizer)
    assert processors is not None
    answer: list[int] = []
    found = 0
    for _ in range(25):
        path: tuple[int, ...] = ()
        while len(path) < 4:
            expected = {token for token in range(VOCAB) if wanted in text_of(tokenizer, [*answer, *path, token])}
            assert banned(processors, path) == expected
            found += len(expected)
            free = [token for token in pieces if token not in expected] or [
                token for token in range(VOCAB) if token not in expected
            ]
            spelled = text_of(tokenizer, [*answer, *path])
            held = max(length for length in range(len(wanted)) if spelled.endswith(wanted[:length]))
            onward = [token for token in free if wanted[held:].startswith(text_of(tokenizer, [token]) or b"-")]
            path = (*path, rng.choice(onward if onward and rng.random() < 0.8 else free))
        processors.commit(path[:2])
        answer += path[:2]
    assert found


def test_w10_several_words_and_lists_of_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    processors = make_processors(SamplingParams(bad_words=["xy", "yz", ids, [5]]), ids[:1], VOCAB, (), tokenizer)
    assert processors is not None
    x, y, z = (tokenizer.encode(c)[0] for c in "xyz")
    assert 5 in banned(processors, ())
    assert banned(processors, (x,)) >= {y, 5}
    assert z not in banned(processors, (x,))
    assert banned(processors, (z, y)) >= {z, 5}
    assert ids[-1] in banned(processors, tuple(ids[:-1]))


def test_a_special_token_is_banned_by_its_spelling(tokenizer: Tokenizer) -> None:
    processors = make_processors(SamplingParams(bad_words=[END_OF_TEXT]), (1,), VOCAB, (), tokenizer)
    assert processors is not None
    assert tokenizer.vocabulary[END_OF_TEXT] in banned(processors, ())
    spelled = [tokenizer.encode(c)[0] for c in END_OF_TEXT]
    assert spelled[-1] in banned(processors, tuple(spelled[:-1]))


def test_a_text_counts_in_the_answer_only(tokenizer: Tokenizer) -> None:
    """A list of ids counts in the prompt too, as in transformers."""
    word = "return"
    prompt = tokenizer.encode(word[:-1])
    by_text = make_processors(SamplingParams(bad_words=[word]), prompt, VOCAB, (), tokenizer)
    by_ids = make_processors(SamplingParams(bad_words=[[*prompt, 5]]), prompt, VOCAB, (), tokenizer)
    assert by_text is not None
    assert by_ids is not None
    assert tokenizer.encode("n")[0] not in banned(by_text, ())
    assert banned(by_ids, ()) == {5}


def test_without_the_bytes_of_its_tokens_a_text_stands_for_token_sequences() -> None:
    class Words:
        token_bytes, special_ids = None, frozenset[int]()

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [7, 8] if text.startswith(" ") else [9]

    sequences, texts = split_words(["word"], 20, Words())  # type: ignore[arg-type]
    assert (sequences, texts) == ({(7, 8), (9,)}, None)


def test_tokens_are_found_by_their_bytes() -> None:
    rng = random.Random(0)
    written = {i: bytes(rng.choices(b"ab\xff", k=rng.randrange(5))) for i in range(200)}
    tokens = TokenTexts(written)
    for _ in range(60):
        text = bytes(rng.choices(b"ab", k=rng.randrange(1, 4)))
        assert tokens.containing(text) == [i for i, one in written.items() if text in one]
        assert sorted(tokens.beginning(text)) == [i for i, one in written.items() if one.startswith(text)]


def test_a_long_list_is_looked_up_not_gone_through() -> None:
    """What completes a text behind an answer: as by definition, in far fewer calls than there are texts."""
    rng, calls = random.Random(0), list[str]()
    texts = {bytes(rng.choices(b"abcdefghijklmnop", k=rng.randrange(2, 9))) for _ in range(3000)}
    tokens = TokenTexts({token: bytes([token]) for token in range(256)})
    found = BannedTexts(texts, tokens)
    answer = [*rng.choices(b"abcdefghijklmnop", k=20), 255, *min(texts, key=len)[:-1]]
    found.commit(answer[:4])
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _call: calls.append(event))
    try:
        parts = found.after(answer[4:])
    finally:
        sys.setprofile(before)
    rests = {text[k:] for text in texts for k in range(1, len(text)) if bytes(answer).endswith(text[:k])}
    assert [part.tolist() for part in parts] == [tokens.beginning(rest) for rest in sorted(rests)]
    assert len(calls) < len(texts)
    found_once = tokens.containing.cache_info().misses
    assert BannedTexts(texts, tokens).single_ids == found.single_ids
    assert tokens.containing.cache_info().misses == found_once


@pytest.fixture(scope="module")
def reference() -> Iterator[LLM]:
    with LLM("reference:target", dtype="float32", cache_tokens=2048) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_w10_a_banned_text_never_appears(reference: LLM, temperature: float) -> None:
    """Every drafter gives the plain answer, and none of the words is anywhere in it."""
    words = [" ", "self", "ret", "de"]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, bad_words=words)
    prompts = ["def main(self):\n    return se", "class Parser:\n"]
    answers = []
    for spec in (
        SpecConfig(),
        SpecConfig("ngram", num_draft=4),
        SpecConfig("draft_model", "reference:draft", num_draft=3),
    ):
        answers.append([out.text for out in reference.generate(prompts, params, spec)])
    assert answers[0] == answers[1] == answers[2]
    assert all(text for text in answers[0])
    assert not any(word in text for text in answers[0] for word in words)
    free = reference.generate(prompts, SamplingParams(max_tokens=40, temperature=temperature, seed=3))
    assert any(word in out.text for out in free for word in words)


def test_a_banned_text_that_a_structure_forces_is_an_error(reference: LLM) -> None:
    for spec in (SpecConfig(), SpecConfig("ngram", num_draft=6)):
        out = reference.generate(["x"], SamplingParams(max_tokens=20, regex="abcdef", bad_words=["cde"]), spec)[0]
        assert isinstance(out.error, InputError)
        assert out.error.field == "bad_words"
        assert "cde" not in out.text
