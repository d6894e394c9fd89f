"""The committed text in the draft's tokens, always as a fresh encoding would give it; a draft's text in the target's
tokens.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer as Written
from tokenizers import decoders, models

from foretoken.draft.retokenize import DraftText, Ending, continuation, draft_writes
from foretoken.text.tokenizer import load_tokenizer
from foretoken.text.vocabulary import Side, special_twins, spellings
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer

KINDS = ("bytes", "sentencepiece", "unigram", "wordpiece")
PAIRS = [(one, other) for one, other in itertools.product(KINDS, KINDS) if one != other]
SPOKEN = [(one, other) for one, other in PAIRS if "wordpiece" not in (one, other)]
WORDS = [
    "the",
    " cat",
    " sat",
    "\n",
    "    ",
    " für",
    "猫",
    " 😀",
    "\u200d",
    "naïve",
    " ",
    "  ",
    "\t",
    "e\u0301",
    "x",
    ".",
    "1234",
    "return",
    " \n ",
]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Side]:
    folder, made = tmp_path_factory.mktemp("sides"), {}
    for kind in KINDS:
        tokenizer = load_tokenizer(
            tiny_tokenizer(folder / kind, 400, PROSE) if kind == "bytes" else foreign_tokenizer(folder / kind, kind)
        )
        assert tokenizer is not None
        made[kind] = Side(tokenizer, 1000, (tokenizer.eos_token_id,))
    return made


def draft_text(sides: dict[str, Side], target: str, draft: str, *limits: int) -> DraftText:
    return DraftText(
        sides[target].tokenizer, sides[draft], special_twins(sides[target], sides[draft]).to_draft, *limits
    )


def any_text(random: Random, most: int) -> str:
    words = (
        random.choice(WORDS) if random.random() < 0.9 else chr(random.randrange(32, 0xD000))
        for _ in range(random.randrange(most))
    )
    return "".join(words)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_after_every_round_the_state_is_a_fresh_encoding(sides: dict[str, Side], target: str, draft: str) -> None:
    """Every kind of space and character, random tokens, ends of text; settled tokens never change."""
    tokenizer, num_settled = sides[target].tokenizer, 0
    for seed in range(12):
        random = Random(seed)
        noise = [random.randrange(tokenizer.vocab_size) for _ in range(random.randrange(8))]
        ids = [
            *tokenizer.encode(any_text(random, 90)),
            *noise,
            *tokenizer.encode(any_text(random, 90), add_special_tokens=False),
        ]
        text, place = draft_text(sides, target, draft, 60, 24), 0
        while place < len(ids):
            settled, length = text.ids[: text.num_settled], random.randrange(1, 9)
            text.push(ids[place : place + length])
            assert text.ids[: len(settled)] == settled
            place += length
            fresh = draft_text(sides, target, draft, 10**9, 0)  # no boundaries
            fresh.push(ids[:place])
            assert text.ids == fresh.ids
            num_settled += text.num_settled > 20
    assert num_settled > 10  # the test means something


def test_no_boundary_where_tokens_reach_over_spaces(sides: dict[str, Side], tmp_path: Path) -> None:
    """A tokenizer that merges letters with the space behind them: every cut before a space would change the tokens."""
    written = Written(
        models.BPE(
            vocab={token: i for i, token in enumerate(("a", "b", " ", "a ", "b "))}, merges=[("a", " "), ("b", " ")]
        )
    )
    written.decoder = decoders.Fuse()
    written.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    text = DraftText(sides["bytes"].tokenizer, Side(tokenizer, 5, ()), {}, 60, 24)
    said = sides["bytes"].tokenizer.encode("ab ba a bb " * 30)
    for start in range(0, len(said), 7):
        text.push(said[start : start + 7])
        assert text.ids == tokenizer.encode(sides["bytes"].tokenizer.decode(said[: start + 7]))
    assert text.num_settled == 0


@pytest.mark.parametrize(("target", "draft"), SPOKEN)
def test_the_text_is_that_of_the_tokens(sides: dict[str, Side], target: str, draft: str) -> None:
    for text in ("the cat sat", " the cat", "for i in:\n", "the\n the  cat"):
        state = draft_text(sides, target, draft)
        state.push(sides[target].tokenizer.encode(text, add_special_tokens=False))
        tokenizer = sides[draft].tokenizer
        if "unigram" not in (target, draft):  # it has few characters, and one mark for runs of spaces
            assert state.ids == tokenizer.encode(text)
            assert not state.ending.held


def test_a_text_that_ends_inside_a_character_waits(sides: dict[str, Side]) -> None:
    """The bytes of 😀 come one by one: the text grows when the last one is there, and `held` has the others
    meanwhile.
    """
    tokenizer, spelling = sides["bytes"].tokenizer, spellings(sides["bytes"])
    assert spelling is not None
    state = draft_text(sides, "bytes", "sentencepiece")
    state.push(tokenizer.encode("the"))
    before, character = list(state.ids), "😀".encode()
    for byte in range(3):
        state.push([spelling[character[byte : byte + 1]]])
        assert (state.ids, state.ending) == (before, Ending("the", character[: byte + 1]))
        # the draft speaks of the whole character, and what is missing of it comes first
        draft_tokens = continuation(sides["bytes"], spelling, state.ending, "😀 cat")
        assert b"".join(tokenizer.token_bytes[token] for token in draft_tokens) == "😀 cat".encode()[byte + 1 :]
        assert not continuation(sides["bytes"], spelling, state.ending, "x cat")
    state.push([spelling[character[3:]]])
    assert state.ending == Ending("the😀")


def test_special_tokens_and_beginnings(sides: dict[str, Side]) -> None:
    """The draft's own beginning stands there once; ends pair up; a special token that the draft lacks is nothing."""
    sentencepiece, plain = sides["sentencepiece"].tokenizer, sides["bytes"].tokenizer
    state = draft_text(sides, "sentencepiece", "bytes")
    cat = sentencepiece.encode(" cat", add_special_tokens=False)
    state.push([1, *cat, 0, 2, *cat])
    body = plain.encode(" cat")
    assert state.ids in ([0, *body, 0, *body], [0, *plain.encode("cat"), 0, *plain.encode("cat")])
    state = draft_text(sides, "bytes", "sentencepiece")
    state.push([0, *plain.encode("the"), 0])
    assert state.ids == [*sentencepiece.encode("the"), 2]
    assert state.at_start


@pytest.mark.parametrize(("target", "draft"), SPOKEN)
@pytest.mark.parametrize(
    "text",
    [
        "the cat sat on the mat and the dog ran",
        "for i in range(10):\n    print(i)\n\treturn self.name",
        "für naïve 猫 😀 schön",
    ],
)
def test_a_text_goes_over_and_back(sides: dict[str, Side], target: str, draft: str, text: str) -> None:
    """Wherever the target stands in its own text, a draft that goes on with this text drafts the target's own
    next tokens.
    """
    whole = sides[target].tokenizer.encode(text, add_special_tokens=False)
    writes = sides[target].tokenizer.token_bytes
    assert writes is not None
    if (
        sides[target].tokenizer.decode(whole) != text
        or sides[draft].tokenizer.decode(sides[draft].tokenizer.encode(text)) != text
    ):
        return  # characters that one of them does not know
    tried = 0
    for place in range(1, len(whole)):
        state = draft_text(sides, target, draft)
        state.push(whole[:place])
        if state.ending.held:
            continue
        own = sides[draft].tokenizer.encode(text, add_special_tokens=False)
        known = state.ids[len(sides[draft].tokenizer.opening_ids) :]
        if own[: len(known)] != known:  # the draft stands inside one of its words and would go on another way
            continue
        written = draft_writes(sides[draft].tokenizer, state.ids, own[len(known) :], state.at_start)
        assert continuation(sides[target], spellings(sides[target]), state.ending, written) == whole[place:]
        tried += 1
    assert tried


def test_a_word_that_the_target_began_in_its_own_way(sides: dict[str, Side]) -> None:
    """Letter by letter: the rest of the letters is spelt, and what follows is encoded as ever."""
    tokenizer, spelling = sides["bytes"].tokenizer, spellings(sides["bytes"])
    assert spelling is not None
    assert len(tokenizer.encode("return")) == 1
    draft_tokens = continuation(sides["bytes"], spelling, Ending("retu"), "rn self")
    assert [tokenizer.token(token) for token in draft_tokens] in (["r", "n", "Ġself"], ["rn", "Ġself"])


def test_what_cannot_be_joined_gives_nothing(sides: dict[str, Side]) -> None:
    wordpiece = sides["wordpiece"]
    assert not continuation(wordpiece, spellings(wordpiece), Ending("the m"), "at")
    draft_tokens = continuation(wordpiece, spellings(wordpiece), Ending("the cat"), " sat on")
    assert draft_tokens == wordpiece.tokenizer.encode("sat on")
    assert (
        draft_writes(
            wordpiece.tokenizer,
            wordpiece.tokenizer.encode("the cat"),
            wordpiece.tokenizer.encode("sat on"),
            at_start=False,
        )
        == " sat on"
    )
    tokenizer = sides["bytes"].tokenizer
    assert draft_writes(tokenizer, [], tokenizer.encode("cat 猫")[:-1], at_start=False) in (
        "cat ",
        "cat",
    )  # half a character is no text


def test_columns_that_the_target_lacks_end_the_draft_tokens(sides: dict[str, Side]) -> None:
    spelling = spellings(sides["bytes"])
    draft_tokens = continuation(sides["bytes"], spelling, Ending("the"), " list is the class")
    cut = Side(sides["bytes"].tokenizer, max(draft_tokens), ())
    assert (
        continuation(cut, spelling, Ending("the"), " list is the class")
        == draft_tokens[: draft_tokens.index(max(draft_tokens))]
    )
