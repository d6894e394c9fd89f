"""Anthropic's SDK for Python: messages whole and streamed, a tool round, counted tokens, errors as its own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from conftest import MODEL
from pydantic import BaseModel, TypeAdapter

MESSAGES: Any = [{"role": "user", "content": "A function that adds."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Bern", "Rome"]},
            "days": {"type": "integer", "enum": [1, 2]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
# The client's methods no longer name the sampling parameters; the interface has them.
GREEDY: Any = {"temperature": 0}
COMMON: Any = {"model": MODEL, "messages": MESSAGES, "system": "Python.", "max_tokens": 24, "extra_body": GREEDY}


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server, api_key="none") as client:
        yield client


def test_a_message_validates_strictly(client: anthropic.Anthropic) -> None:
    sampling = GREEDY | {"top_k": 40, "top_p": 0.9}
    raw = client.messages.with_raw_response.create(**COMMON | {"extra_body": sampling, "metadata": {"user_id": "one"}})
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    found = Message.model_validate_json(raw.text(), strict=True)
    assert found.stop_reason == "max_tokens"
    assert found.stop_sequence is None
    assert [block.type for block in found.content] == ["text"]
    assert found.usage.output_tokens == 24
    again = client.messages.create(**COMMON)
    assert again.content[0].text == found.content[0].text


def test_prompt_tokens_are_counted_once(client: anthropic.Anthropic) -> None:
    """Those that were found in the cache stand beside the others."""
    system = "Python, with types and tests. " * 20
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system=system).input_tokens
    usages = [client.messages.create(**COMMON | {"system": system}).usage for _ in range(2)]
    assert [usage.input_tokens + (usage.cache_read_input_tokens or 0) for usage in usages] == [count, count]
    assert usages[1].cache_read_input_tokens


def test_a_stream_is_the_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**COMMON)
    kinds = []
    with client.messages.create(**COMMON, stream=True) as stream:
        for event in stream:
            TypeAdapter(RawMessageStreamEvent).validate_python(event.model_dump(), strict=True)
            kinds.append(event.type)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    with client.messages.stream(**COMMON) as events:
        text = "".join(events.text_stream)
        found = events.get_final_message()
    assert text == whole.content[0].text == found.content[0].text
    assert found.stop_reason == whole.stop_reason
    assert found.usage.output_tokens == whole.usage.output_tokens
    assert found.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    common = COMMON | {"extra_body": {"seed": 3}}
    text = client.messages.create(**common).content[0].text
    pieces = [text[at : at + 4] for at in range(len(text) // 2, len(text))]
    stop = next(piece for piece in pieces if text.index(piece))
    found = client.messages.create(**common, stop_sequences=["never written", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_round(client: anthropic.Anthropic, choice: Any, stream: bool) -> None:
    common = COMMON | {"tools": [WEATHER], "max_tokens": 80}
    forced = common | {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
    if stream:
        with client.messages.stream(**forced) as events:
            parts = [event.partial_json for event in events if event.type == "input_json"]
            found: Any = events.get_final_message()
        assert "".join(parts)
    else:
        found = client.messages.create(**forced)
    assert found.stop_reason == "tool_use"
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    assert call.input["city"] in ("Bern", "Rome")
    assert call.input["days"] in (1, 2)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [{"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**common | {"messages": [*MESSAGES, *turns], "max_tokens": 4})
    assert after.content
    plain = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[WEATHER]).input_tokens > plain
    without = client.messages.create(**common | {"tool_choice": {"type": "none"}, "max_tokens": 4})
    assert [block.type for block in without.content] == ["text"]


class _Point(BaseModel):
    x: bool
    y: bool


def test_parsed_answers(client: anthropic.Anthropic) -> None:
    found = client.messages.parse(**COMMON | {"max_tokens": 60}, output_format=_Point)
    assert isinstance(found.parsed_output, _Point)


def test_speculation_of_one_request(client: anthropic.Anthropic) -> None:
    plain = client.messages.create(**COMMON)
    found = client.messages.create(**COMMON | {"extra_body": GREEDY | {"spec": {"drafter": "ngram", "num_draft": 3}}})
    assert found.content[0].text == plain.content[0].text
    assert found.model_extra is not None
    assert found.model_extra["foretoken"]["spec"]["drafter"] == "ngram"


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**COMMON | {"model": "another"})
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "model_not_found")
    assert missing.value.request_id
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    blocks: Any = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    with pytest.raises(anthropic.BadRequestError) as image:
        client.messages.create(**COMMON | {"messages": [{"role": "user", "content": blocks}]})
    assert image.value.type == "invalid_request_error"
    assert image.value.api_message == (
        "messages.0.content.1.type: image is not supported: this model reads text only; "
        "send what it says as a block of type text"
    )
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(**COMMON | {"messages": [{"role": "user", "content": "word " * 9000}]})


def test_keys(start: Callable[..., str]) -> None:
    server = start("--api-key", "secret-key")
    for given in ({"api_key": "secret-key"}, {"auth_token": "secret-key"}):
        with anthropic.Anthropic(base_url=server, **given) as client:
            assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    client = anthropic.Anthropic(base_url=server, api_key="another")
    with client, pytest.raises(anthropic.AuthenticationError) as wrong:
        client.messages.create(**COMMON)
    assert wrong.value.type == "authentication_error"


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = list(client.models.list())
    assert (model.id, model.type) == (MODEL, "model")
    assert client.models.retrieve(MODEL).display_name
