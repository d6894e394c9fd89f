"""Where an answer ends: the end token, stop strings and max_tokens cut exactly there, wherever they fall in an accepted
run.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import LLM, SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.group import DrafterGroup
from foretoken.engine.engine import Engine
from foretoken.engine.request import RequestState, TextAssembler
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer
from tests.helpers.scripted import ScriptedModel, recite
from tests.helpers.specs import key_of
from tests.text.test_tokenizer import byte_fallback

VOCAB, PROMPT = 300, [65, 66, 67]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = load_tokenizer(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB))
    assert loaded is not None
    return loaded


@dataclass
class Answer:
    """A finished request and what came out of it step by step."""

    state: RequestState
    steps: list[StepOutput]

    @property
    def summary(self) -> tuple[str, list[int], str | None]:
        return self.state.text.text, self.state.output_ids, self.state.finish_reason


def speak(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, num_draft: int = 0, wrong_every: int = 0
) -> Answer:
    """The target says `ids`, then the end token; the draft knows them all, or all but every `wrong_every`th."""
    eos = tokenizer.vocabulary[END_OF_TEXT]
    said = recite(ids, len(PROMPT), eos)
    drafted = [
        (token + 1) % VOCAB if wrong_every and i % wrong_every == wrong_every - 1 else token
        for i, token in enumerate(ids)
    ]
    target = ScriptedModel(said, VOCAB, [eos])
    drafters = DrafterGroup(target)
    drafters.drafters[key_of("draft_model", "d")] = DraftModelDrafter(
        ScriptedModel(recite(drafted, len(PROMPT), eos), VOCAB)
    )
    engine = Engine(target, drafters, tokenizer)
    state = engine.submit(PROMPT, params, SpecConfig("draft_model", "d", num_draft=num_draft))
    steps = []
    while engine.has_work:
        steps += engine.step()
    answer = Answer(state, steps)
    check(answer, params)
    return answer


def check(answer: Answer, params: SamplingParams) -> None:
    """What holds for every answer: the pieces are the text, nothing is lost, nothing follows the end."""
    state, steps = answer.state, answer.steps
    assert "".join(step.text for step in steps) == "".join(map(str, steps)) == state.text.text
    assert [token for step in steps for token in step.token_ids] == state.output_ids
    assert [origin for step in steps for origin in step.provenance] == state.provenance
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + [state.finish_reason]
    assert len(state.output_ids) <= params.max_tokens
    if not params.include_stop_str_in_output:
        assert not any(stop in state.text.text for stop in params.stop_strings)


def by_hand(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> tuple[str, list[int], str]:
    """The slow definition: after every token decode everything, and look."""
    said, includes = [*ids, tokenizer.vocabulary[END_OF_TEXT]], params.include_stop_str_in_output
    for count in range(1, len(said) + 1):
        done = said[:count]
        stopped = count == len(said) or done[-1] in params.stop_token_ids
        ended = stopped or count == params.max_tokens
        text = tokenizer.decode(done[:-1] if stopped and not includes else done, not params.skip_special_tokens)
        certain = text if ended else text.rstrip("\ufffd")
        places = [(certain.find(stop), len(stop)) for stop in params.stop_strings if stop in certain]
        if places:
            place, length = min(places)
            return certain[: place + length * includes], done, "stop"
        if ended:
            return text, done, "stop" if stopped else "length"
    raise AssertionError


TEXTS = [
    "def f(self):\n    return the list\n\ndef g(self):\n    return 1\n",
    "für 猫 und 😀😀, naïve 😀 end",
    "aaaaabaaab ababab abab",
]
STOPS: list[str | tuple[str, ...]] = [(), "\n", "\n\n", "return", ("return 1", "list"), (" ", "def f"), "never"]
STOPS += ["😀", ("😀😀", "猫 u"), "aab", ("abab", "bab"), ("aaab", "aab", "ab")]


@pytest.mark.parametrize("text", TEXTS, ids=["code", "characters", "repeats"])
@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_stop_strings_cut_exactly(tokenizer: Tokenizer, text: str, stop: str | tuple[str, ...]) -> None:
    """Over one or several tokens and steps, several at once, overlapping, of multi-byte characters; any number of
    draft tokens.
    """
    ids, params = tokenizer.encode(text), SamplingParams(max_tokens=200, stop=stop)
    expected = by_hand(tokenizer, ids, params)
    for num_draft, wrong_every in itertools.product((0, 1, 3, 8), (0, 3)):
        assert speak(tokenizer, ids, params, num_draft, wrong_every).summary == expected


@pytest.mark.parametrize("text", TEXTS, ids=["code", "characters", "repeats"])
@pytest.mark.parametrize("stop", STOPS, ids=repr)
def test_what_ended_an_answer_may_stay_in_its_text(
    tokenizer: Tokenizer, text: str, stop: str | tuple[str, ...]
) -> None:
    """vLLM's `include_stop_str_in_output` and `skip_special_tokens`; the end token is spelt only with both."""
    ids = tokenizer.encode(text)
    for skips in (True, False):
        params = SamplingParams(max_tokens=200, stop=stop, include_stop_str_in_output=True, skip_special_tokens=skips)
        expected = by_hand(tokenizer, ids, params)
        for num_draft in (0, 3):
            assert speak(tokenizer, ids, params, num_draft).summary == expected


@pytest.mark.parametrize("text", TEXTS, ids=["code", "characters", "repeats"])
@pytest.mark.parametrize("includes", [False, True], ids=["cut", "kept"])
def test_any_token_may_end_an_answer(tokenizer: Tokenizer, text: str, includes: bool) -> None:
    """vLLM's `stop_token_ids`, wherever the token stands in an accepted run, and where end tokens are ignored."""
    ids = tokenizer.encode(text)
    for place, ignores in itertools.product((0, 2, len(ids) - 1), (False, True)):
        params = SamplingParams(
            max_tokens=200, stop_token_ids=[ids[place], 7], include_stop_str_in_output=includes, ignore_eos=ignores
        )
        expected = by_hand(tokenizer, ids, params)
        assert expected[1] == ids[: ids.index(ids[place]) + 1]
        for num_draft in (0, 1, 3, 8):
            assert speak(tokenizer, ids, params, num_draft).summary == expected


@pytest.mark.parametrize("num_draft", [0, 2, 5, 8])
def test_max_tokens_cuts_anywhere(tokenizer: Tokenizer, num_draft: int) -> None:
    """Every limit from one token to past the end, also in the middle of a character and of an accepted run."""
    ids = tokenizer.encode(TEXTS[1])
    for limit in range(1, len(ids) + 4):
        params = SamplingParams(max_tokens=limit)
        answer = speak(tokenizer, ids, params, num_draft)
        assert answer.summary == by_hand(tokenizer, ids, params)
        assert answer.state.finish_reason == ("length" if limit <= len(ids) else "stop")
        assert answer.state.stats.num_drafted <= max(0, limit - 1)  # no draft token that could never be used


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    text=st.text(alphabet="ab é😀", max_size=25),
    stop=st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=4), max_size=3),
    limit=st.integers(1, 30),
    num_draft=st.integers(0, 8),
    wrong_every=st.sampled_from([0, 2, 5]),
)
def test_random_texts_and_stops(
    tokenizer: Tokenizer, text: str, stop: list[str], limit: int, num_draft: int, wrong_every: int
) -> None:
    ids, params = tokenizer.encode(text), SamplingParams(max_tokens=limit, stop=tuple(stop))
    assert speak(tokenizer, ids, params, num_draft, wrong_every).summary == by_hand(tokenizer, ids, params)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(1, VOCAB - 1), max_size=25), num_draft=st.integers(0, 8))
def test_random_tokens_stream_to_their_decoding(tokenizer: Tokenizer, ids: list[int], num_draft: int) -> None:
    """Tokens that break characters apart: the pieces still join to what the tokenizer makes of all of them."""
    answer = speak(tokenizer, ids, SamplingParams(max_tokens=100), num_draft)
    assert answer.state.text.text == tokenizer.decode(answer.state.output_ids)


def test_half_characters_wait(tokenizer: Tokenizer) -> None:
    """The bytes of an emoji come in several tokens; no piece shows a part of it."""
    ids = tokenizer.encode("x🦖y")
    halves = len(ids) - 3  # tokens of the emoji but its last
    assert halves >= 2
    for num_draft in (0, 1, 2, 4):
        steps = speak(tokenizer, ids, SamplingParams(max_tokens=50), num_draft).steps
        assert "\ufffd" not in "".join(step.text for step in steps)
    plain = [step.text for step in speak(tokenizer, ids, SamplingParams(max_tokens=50)).steps]
    assert plain == ["x", *[""] * halves, "🦖", "y", ""]


def test_possible_stop_text_is_held_back_and_let_go(tokenizer: Tokenizer) -> None:
    """ "ab" may begin "abX": it waits, and comes as soon as it cannot."""
    ids = [tokenizer.vocabulary[c] for c in "1ab2ababX3"]
    answer = speak(tokenizer, ids, SamplingParams(max_tokens=50, stop="abX"))
    assert [step.text for step in answer.steps] == ["1", "", "", "ab2", "", "", "ab", "", ""]
    assert answer.state.text.text == "1ab2ab"
    assert answer.state.output_ids == ids[:9]  # the tokens of the stop string count, what follows does not exist


def test_tokens_after_the_cut_leave_no_trace(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.vocabulary[c] for c in "abcdefghij"]
    state = speak(tokenizer, ids, SamplingParams(max_tokens=50, stop="d"), num_draft=8).state
    assert state.output_ids == ids[:4]
    assert state.stats.num_emitted == len(state.provenance) == 4
    assert (state.stats.num_drafted, state.stats.num_accepted) == (
        8,
        3,
    )  # the rule took all eight; three draft tokens left
    assert state.stats.accepted_per_position == ((1, 1),) * 3 + ((1, 0),) * 5
    assert [origin.kind for origin in state.provenance] == ["plain", *["accepted"] * 3]


@pytest.mark.parametrize("num_draft", [0, 4])
def test_ignore_eos_goes_on(tokenizer: Tokenizer, num_draft: int) -> None:
    """The end token then is a token like any other, without text, and stop strings reach across it."""
    eos = tokenizer.vocabulary[END_OF_TEXT]
    ids = [*(tokenizer.vocabulary[c] for c in "ab"), eos, eos, *(tokenizer.vocabulary[c] for c in "cd")]
    assert speak(tokenizer, ids, SamplingParams(max_tokens=6), num_draft).summary == ("ab", ids[:3], "stop")
    assert speak(tokenizer, ids, SamplingParams(max_tokens=6, ignore_eos=True), num_draft).summary == (
        "abcd",
        ids,
        "length",
    )
    assert speak(tokenizer, ids, SamplingParams(max_tokens=6, ignore_eos=True, stop="bc"), num_draft).summary == (
        "a",
        ids[:5],
        "stop",
    )


@pytest.mark.parametrize("num_draft", [0, 4])
def test_which_reason_wins(tokenizer: Tokenizer, num_draft: int) -> None:
    ids = [tokenizer.vocabulary[c] for c in "abc"]
    assert speak(tokenizer, ids, SamplingParams(max_tokens=3, stop="c"), num_draft).summary == (
        "ab",
        ids,
        "stop",
    )  # both at once
    assert speak(tokenizer, ids, SamplingParams(max_tokens=3), num_draft).summary == ("abc", ids, "length")
    assert (
        speak(tokenizer, ids, SamplingParams(max_tokens=4), num_draft).state.finish_reason == "stop"
    )  # the end token is the fourth
    assert speak(tokenizer, ids, SamplingParams(max_tokens=3, stop=("bc", "ab")), num_draft).summary == (
        "",
        ids[:2],
        "stop",
    )
    assert speak(tokenizer, ids, SamplingParams(max_tokens=3, stop=("c", "bc")), num_draft).summary == (
        "a",
        ids,
        "stop",
    )  # the earliest place


class Pieces:
    """A decoder for the assembler alone: token i adds `pieces[i]`, the end adds `tail`."""

    def __init__(self, pieces: Sequence[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return self.tail


def test_a_stop_string_inside_one_long_piece() -> None:
    text = TextAssembler(Pieces(["one STOP two STOP"]), ("STOP",))
    assert text.push(0)
    assert text.text == text.release(final=True) == "one "


def test_a_stop_string_that_ends_in_the_last_held_bytes() -> None:
    text = TextAssembler(Pieces(["a"], tail="\ufffd"), ("a\ufffd",))
    assert not text.push(0)
    assert text.release(final=False) == ""
    assert text.finish(cut=False)
    assert text.release(final=True) == text.text == ""


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_no_more_is_held_than_must_be(pieces: list[str], stops: list[str]) -> None:
    """Exactly the longest end of the text that begins a stop string waits, and what was let go is never taken back."""
    text, sent, whole = TextAssembler(Pieces(pieces), tuple(stops)), "", ""
    for token, piece in enumerate(pieces):
        whole += piece
        stopped = text.push(token)
        sent += text.release(final=stopped)
        assert stopped == any(stop in whole for stop in stops)
        if stopped:
            assert sent == whole[: min(whole.find(stop) for stop in stops if stop in whole)]
            return
        longest = max((n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n])), default=0)
        assert sent == whole[: len(whole) - longest]


class Compared(str):
    """A stop string that counts how often the end of a text was compared with it."""

    num_compared = 0

    def startswith(self, *arguments: Any) -> bool:
        self.num_compared += 1
        return super().startswith(*arguments)


def test_long_stop_strings_are_compared_only_where_they_may_begin() -> None:
    """The engine's thread asks at every token: a comparison for each length would hold up all other requests."""
    stop = Compared("x" * 1000 + "y")
    text = TextAssembler(Pieces(["abc " * 1000, "xx"]), (stop,))
    for token, held in ((0, 0), (1, 2)):
        assert not text.push(token)
        text.release(final=False)
        assert text._held_back() == held
    assert stop.num_compared <= 2


@pytest.mark.parametrize("drafter", ["draft_model", "ngram", None])
def test_stops_of_a_real_model(text_pair: SimpleNamespace, drafter: str | None) -> None:
    """Any part of what it would say can be the stop string; `stream` and `generate` agree with the plain answer cut by
    hand.
    """
    with LLM(text_pair.target, dtype="float32", cache_tokens=1024) as llm:
        spec = SpecConfig(
            drafter, str(text_pair.draft) if drafter == "draft_model" else None, num_draft=5 if drafter else "auto"
        )
        free = llm.generate(["the list of self"], SamplingParams(max_tokens=40, ignore_eos=True))[0]
        for place in range(2, len(free.text) - 3, 7):
            stop = free.text[place : place + 1 + place % 3]
            params = SamplingParams(max_tokens=40, ignore_eos=True, stop=stop)
            expected = free.text[: free.text.find(stop)]
            out = llm.generate(["the list of self"], params, spec)[0]
            assert (out.text, out.finish_reason) == (expected, "stop")
            assert out.token_ids == free.token_ids[: len(out.token_ids)]
            assert "".join(map(str, llm.stream("the list of self", params, spec))) == expected


@pytest.mark.parametrize("num_draft", [0, 3])
def test_the_space_that_an_answer_begins_with_is_kept(tmp_path: Path, num_draft: int) -> None:
    """SentencePiece drops the space in front of a text. An answer is none: it follows the prompt."""
    tokenizer = byte_fallback(tmp_path)
    words = [tokenizer.vocabulary[token] for token in ("▁f", "a", "▁de")]
    tokenizer.vocabulary[END_OF_TEXT] = VOCAB - 1
    answer = speak(tokenizer, words, SamplingParams(max_tokens=9, stop=["de"]), num_draft)
    assert answer.state.text.text == "".join(step.text for step in answer.steps) == " fa "
