"""Which text stands with which token, where tokens and characters do not agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import pytest

from foretoken.backend.call import Begun, Piece, TokenEvent
from foretoken.backend.local import LocalBackend
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.token_texts import TextDivision
from tests.helpers.fake_backend import FakeBackend, ended
from tests.helpers.http import client_of, events_of, run
from tests.server.structured import events_of as named_events_of

LETTERS = "ab éß 日本\n\U0001f600\U0001f1e8"


def tokens_of(*written: bytes) -> tuple[TokenEvent, ...]:
    return tuple(
        TokenEvent(place, one.decode("utf-8", "replace"), one, "plain", None, place, logprob=-1.0)
        for place, one in enumerate(written)
    )


def divided(texts: TextDivision, text: str, *written: bytes) -> list[str]:
    return [one.text for one in texts.divide(text, tokens_of(*written))]


def bytewise(text: str) -> list[bytes]:
    return [bytes([one]) for one in text.encode()]


@pytest.mark.parametrize("seed", range(50))
def test_texts_stand_with_the_tokens_that_complete_their_characters(seed: int) -> None:
    rng = random.Random(seed)
    whole = "".join(rng.choices(LETTERS, k=30))
    data, written = whole.encode(), list[bytes]()
    while data:
        size = rng.randint(1, 5)
        written, data = [*written, data[:size]], data[size:]
    texts, given, done, starts = TextDivision(7), "", b"", list[int]()
    while written:
        count = rng.randint(1, 4)
        part, written = written[:count], written[count:]
        complete = (done + b"".join(part)).decode("utf-8", "ignore")
        held = rng.choice([0, 0, 0, 1, 3]) if written else 0  # as for a stop string
        text = complete[len(given) : max(len(given), len(complete) - held)]
        found = texts.divide(text, tokens_of(*part))
        assert "".join(one.text for one in found) == text
        for (own, start), token in zip(found, part, strict=True):
            assert start == 7 + len(done.decode("utf-8", "ignore"))
            done += token
            given += own
            assert given == done.decode("utf-8", "ignore")[: len(given)]
            if not held:
                assert given == done.decode("utf-8", "ignore")
        starts += [one.start for one in found]
    assert given == whole
    assert starts == sorted(starts)


def test_a_token_that_writes_nothing_has_no_text() -> None:
    texts = TextDivision()
    assert divided(texts, "ab", b"<s>", b"a", b"<|end|>", b"b") == ["", "a", "", "b"]
    assert divided(texts, "c", b"<|end|>") == ["c"]  # whatever comes stands with a token
    assert divided(texts, "de", b"d", b"e") == ["d", "e"]


def test_the_space_in_front_of_a_text_may_be_missing() -> None:
    assert divided(TextDivision(), "a b", b" a", b" b") == ["a", " b"]
    assert divided(TextDivision(), "a b", b"<s>", b" a", b" b") == ["", "a", " b"]


def test_what_stands_behind_the_cut_of_a_stop_string_has_no_text() -> None:
    texts = TextDivision()
    assert divided(texts, "", b"a") == [""]
    assert divided(texts, "ab", b"b", b"cd", b"e") == ["ab", "", ""]


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("\u2581the cat sat", (b" the", b" cat", b" sat"), ["\u2581the", " cat", " sat"]),
        ("\u2581the cat", (b"<s>", b" the", b" cat"), ["", "\u2581the", " cat"]),
        ("xe\u0301y", (b"x", b"\xc3", b"\xa9", b"y"), ["x", "", "e\u0301", "y"]),
        ("\u2581a\u2581b c a b", (b" a", b" b", b" c", b" a", b" b"), ["", "\u2581a\u2581b", " c", " a", " b"]),
        ("a  b c", (b" a", b" b", b" c"), ["a", "  b", " c"]),
    ],
)
def test_the_place_is_found_again_behind_what_is_spelt_otherwise(
    text: str, written: tuple[bytes, ...], expected: list[str]
) -> None:
    found = TextDivision().divide(text, tokens_of(*written))
    assert [one.text for one in found] == expected
    assert [one.start for one in found] == [len("".join(expected[:place])) for place in range(len(expected))]


def ask(script: Sequence[Any], path: str, granularity: str = "step", **body: Any) -> httpx2.Response:
    async def read() -> httpx2.Response:
        async with client_of(create_app(FakeBackend(script), ApiConfig(granularity=granularity))) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

    return run(read())


# Steps of several tokens, of which the first one ends a character that the step before began.
SMILE, FLAG, SUN = bytewise("\U0001f600"), bytewise("\U0001f1e8"), bytewise("日")
STEPS = (
    Piece(0, "a", tokens_of(b"a", SMILE[0])),
    Piece(0, "\U0001f600b", tokens_of(*SMILE[1:], b"b", SUN[0])),
    Piece(0, "日\U0001f1e8c", tokens_of(*SUN[1:], *FLAG, b"c")),
)
ANSWER = "a\U0001f600b日\U0001f1e8c"
SCRIPT = (Begun(((1,),)), *STEPS, ended(0, ANSWER, num_tokens=14))


@pytest.mark.parametrize("granularity", ["step", "token"])
def test_log_probabilities_of_a_response_stand_with_the_text_of_their_tokens(granularity: str) -> None:
    body = {"input": "a", "stream": True, "include": ["message.output_text.logprobs"]}
    events = named_events_of(ask(SCRIPT, "/v1/responses", granularity, **body))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == list(ANSWER)
    for event in deltas:
        assert b"".join(bytes(entry["bytes"]) for entry in event["logprobs"]).decode() == event["delta"]


@pytest.mark.parametrize("granularity", ["step", "token"])
def test_offsets_of_a_completion_are_places_in_its_text(granularity: str) -> None:
    expected = [0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4, 4, 5]
    whole = ask(SCRIPT, "/v1/completions", prompt="a", logprobs=0).json()["choices"][0]
    assert whole["logprobs"]["text_offset"] == expected
    events = events_of(ask(SCRIPT, "/v1/completions", granularity, prompt="a", logprobs=0, stream=True).text)
    parts = [event["choices"][0]["logprobs"]["text_offset"] for event in events if event["choices"][0]["logprobs"]]
    assert [one for part in parts for one in part] == expected


def test_offsets_of_an_answer_do_not_depend_on_how_its_prompt_is_spelt() -> None:
    """The tokenizer of a Qwen folder composes characters: the prompt has one more than its tokens write."""
    prompt = tuple(msgspec.structs.replace(token, kind="prompt") for token in tokens_of(b"x", "\xe9".encode(), b"y"))
    answer = Piece(0, "ab", tokens_of(b"a", b"b"))
    last = msgspec.structs.replace(ended(0, "ab"), prompt=prompt)
    reply = ask((Begun(((1,),)), answer, last), "/v1/completions", prompt="xe\u0301y", logprobs=0, echo=True)
    found = reply.json()["choices"][0]
    assert found["text"] == "xe\u0301yab"
    assert found["logprobs"]["text_offset"] == [0, 1, 3, 4, 5]


def test_offsets_behind_a_prompt_of_special_tokens_are_places_in_the_text(backend: LocalBackend) -> None:
    body = {"prompt": [0, 0, 5], "max_tokens": 2, "echo": True, "logprobs": 0, "temperature": 0}

    async def answer() -> Any:
        async with client_of(create_app(backend)) as client:
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]

    choice = run(answer())
    starts = choice["logprobs"]["text_offset"]
    assert choice["text"].startswith("<|endoftext|>" * 2)
    for start, end, token in zip(starts, [*starts[1:], None], choice["logprobs"]["tokens"], strict=True):
        assert choice["text"][start:end] == token


def test_the_log_probabilities_of_a_prompt_are_those_of_echo(backend: LocalBackend) -> None:
    """vLLM's `prompt_logprobs`, also beside `logprobs` and `echo`, which list another number of alternatives."""
    text: dict[str, Any] = {"prompt": ["def f(x):", "a b c"], "max_tokens": 2, "temperature": 0, "n": 2}
    chat = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 2, "return_token_ids": True}

    async def post(path: str, body: dict[str, Any], **more: Any) -> Any:
        async with client_of(create_app(backend)) as client:
            response = await client.post(path, json=body | more)
            return response.json() | {"status": response.status_code}

    async def ask() -> list[Any]:
        path = "/v1/completions"
        return [
            await post(path, text, echo=True, logprobs=3),
            await post(path, text, echo=True, logprobs=1, prompt_logprobs=3, return_token_ids=True),
            await post(path, text, logprobs=1, prompt_logprobs=0),
            await post("/v1/chat/completions", chat, prompt_logprobs=1),
            await post(path, text, prompt_logprobs=1, stream=True),
            await post(path, text, prompt_logprobs=21),
        ]

    echoed, both, alone, answer, *refused = run(ask())
    for known, found, own in zip(echoed["choices"], both["choices"], alone["choices"], strict=True):
        ids, scored = found["prompt_token_ids"], found["prompt_logprobs"]
        assert scored[0] is own["prompt_logprobs"][0] is None
        for place, token_id in enumerate(ids[1:], 1):
            assert next(iter(scored[place])) == str(token_id)
            assert scored[place][str(token_id)]["logprob"] == known["logprobs"]["token_logprobs"][place]
            assert own["prompt_logprobs"][place] == {str(token_id): scored[place][str(token_id)]}
            tops = {one["decoded_token"]: one["logprob"] for one in scored[place].values()}
            assert tops == known["logprobs"]["top_logprobs"][place]
            assert {1, 2, 3} <= {one["rank"] for one in scored[place].values()}
            assert len(found["logprobs"]["top_logprobs"][place]) <= 2
        assert own["logprobs"]["tokens"] == known["logprobs"]["tokens"][len(ids) :]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) > 1
    assert [one["status"] for one in refused] == [400, 400]
    assert [one["error"]["param"] for one in refused] == ["prompt_logprobs"] * 2


def test_a_text_is_sent_with_the_token_that_completes_it() -> None:
    reply = ask(SCRIPT, "/v1/completions", "token", prompt="a", stream=True, return_token_ids=True)
    choices = [event["choices"][0] for event in events_of(reply.text)]
    found = [(one["text"], one["token_ids"]) for one in choices if one["text"]]
    assert found == [("a", [0]), ("\U0001f600", [2]), ("b", [3]), ("日", [1]), ("\U0001f1e8", [5]), ("c", [6])]


def test_log_probabilities_may_name_tokens_by_their_ids(backend: LocalBackend) -> None:
    """vLLM's `return_tokens_as_token_ids`: names alone change, of whole answers, streams and echoed prompts."""
    greedy: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    chat = greedy | {"messages": [{"role": "user", "content": "def"}], "logprobs": True, "top_logprobs": 3}
    text = greedy | {"prompt": "def f(x):", "logprobs": 3}

    async def post(path: str, body: dict[str, Any], is_named: bool = True, **more: Any) -> Any:
        async with client_of(create_app(backend)) as client:
            reply = await client.post(path, json={**body, **more, "return_tokens_as_token_ids": is_named})
            return [event["choices"][0] for event in events_of(reply.text)] if "stream" in more else reply.json()

    async def ask() -> list[Any]:
        chats, texts = "/v1/chat/completions", "/v1/completions"
        return [
            await post(chats, chat),
            await post(chats, chat, is_named=False),
            await post(chats, chat, stream=True),
            await post(texts, text, echo=True),
            await post(texts, text, stream=True),
        ]

    whole, plain, chunks, echoed, pieces = run(ask())
    choice = whole["choices"][0]
    names = [f"token_id:{one}" for one in choice["token_ids"]]
    entries, known = choice["logprobs"]["content"], plain["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in entries] == names
    for entry, other in zip(entries, known, strict=True):
        assert (entry["bytes"], entry["logprob"]) == (other["bytes"], other["logprob"])
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        assert all(one["token"].startswith("token_id:") for one in entry["top_logprobs"])
    assert [one["token"] for chunk in chunks for one in (chunk["logprobs"] or {}).get("content", ())] == names
    choice = echoed["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    for name, tops in zip(choice["logprobs"]["tokens"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert name in tops
        assert all(one.startswith("token_id:") for one in tops)
    streamed = [one for piece in pieces for one in (piece["logprobs"] or {}).get("tokens", ())]
    assert streamed == choice["logprobs"]["tokens"][len(choice["prompt_token_ids"]) :]


def test_log_probabilities_of_tokens_that_a_client_lists(backend: LocalBackend) -> None:
    """vLLM's `logprob_token_ids`: the listed tokens and the drawn one, whole and streamed."""
    asked: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprob_token_ids": [7, 300]}
    chat = asked | {"messages": [{"role": "user", "content": "def"}], "logprobs": True, "top_logprobs": 1}
    text = asked | {"prompt": "def f(x):", "logprobs": 0}

    async def post(path: str, body: dict[str, Any], **more: Any) -> httpx2.Response:
        async with client_of(create_app(backend)) as client:
            return await client.post(path, json={"return_tokens_as_token_ids": True, **body, **more})

    async def ask() -> list[httpx2.Response]:
        return [
            await post("/v1/chat/completions", chat),
            await post("/v1/chat/completions", chat, stream=True),
            await post("/v1/completions", text),
            await post("/v1/completions", text, logprob_token_ids=list(range(21))),
            await post("/v1/completions", text, logprob_token_ids=[10**6]),
            await post("/v1/completions", text, logprobs=None),
            await post("/v1/chat/completions", chat, logprobs=False, top_logprobs=None),
        ]

    whole, streamed, texts, *refused = run(ask())
    entries = whole.json()["choices"][0]["logprobs"]["content"]
    chunks = [event["choices"][0]["logprobs"] for event in events_of(streamed.text)]
    assert [one for chunk in chunks for one in (chunk or {}).get("content", ())] == entries
    for entry in entries:
        assert {one["token"] for one in entry["top_logprobs"]} == {"token_id:7", "token_id:300", entry["token"]}
    found = texts.json()["choices"][0]["logprobs"]
    for name, tops in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert set(tops) == {"token_id:7", "token_id:300", name}
    assert [one.status_code for one in refused] == [400] * 4
    assert [one.json()["error"]["param"] for one in refused] == ["logprob_token_ids"] * 4


def test_tokens_that_end_an_answer_and_those_that_may_stand_in_it(backend: LocalBackend) -> None:
    """vLLM's `stop_token_ids`, `include_stop_str_in_output`, `skip_special_tokens` and `allowed_token_ids`."""
    asked: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    allowed = list(range(50, 120))

    async def post(**fields: Any) -> httpx2.Response:
        async with client_of(create_app(backend)) as client:
            return await client.post("/v1/completions", json=asked | fields)

    async def choice(**fields: Any) -> dict[str, Any]:
        return (await post(**fields)).json()["choices"][0]

    async def ask() -> None:
        whole = await choice(ignore_eos=True)
        ids = whole["token_ids"]
        place = next(place for place in range(3, 12) if ids[place] not in ids[:place])
        stops = {"stop_token_ids": [ids[place]], "ignore_eos": True}
        cut, kept = await choice(**stops), await choice(include_stop_str_in_output=True, **stops)
        assert cut["token_ids"] == kept["token_ids"] == ids[: place + 1]
        assert cut["finish_reason"] == kept["finish_reason"] == "stop"
        assert cut["stop_reason"] == ids[place]
        assert "stop_reason" not in whole
        texts = await choice(stop=["never", kept["text"][-1:]], stop_token_ids=[10])
        assert texts["stop_reason"] == kept["text"][-1:]
        assert cut["text"] != kept["text"]
        assert kept["text"].startswith(cut["text"])
        assert whole["text"].startswith(kept["text"])
        inside = await choice(allowed_token_ids=allowed)
        assert len(inside["token_ids"]) == 12
        assert set(inside["token_ids"]) <= set(allowed)
        for wrong in (
            {"allowed_token_ids": []},
            {"allowed_token_ids": [10**6]},
            {"stop_token_ids": [10**6]},
            {"stop_token_ids": [0] * 10**4},
            {"use_beam_search": True},
            {"truncate_prompt_tokens": 3},
        ):
            refused = await post(**wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))

    run(ask())
