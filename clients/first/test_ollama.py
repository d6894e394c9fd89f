"""Ollama's client for Python: chats and prompts whole and streamed, a tool round, formats, errors as its own class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import ollama
import pytest
from conftest import MODEL

MESSAGES: Any = [{"role": "system", "content": "Python."}, {"role": "user", "content": "A function that adds."}]
COMMON: Any = {"model": MODEL, "options": {"temperature": 0, "num_predict": 24}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def url(start: Callable[..., str]) -> str:
    return start("--ollama")


@pytest.fixture(scope="module")
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


def test_a_stream_is_the_chat(client: ollama.Client) -> None:
    whole = client.chat(messages=MESSAGES, **COMMON)
    parts = list(client.chat(messages=MESSAGES, stream=True, **COMMON))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (whole.done_reason, whole.eval_count, parts[-1].eval_count) == ("length", 24, 24)
    assert len(parts) > 2
    assert whole.prompt_eval_count
    assert whole.total_duration
    assert client.chat(messages=MESSAGES, logprobs=True, **COMMON).logprobs[0].token


def test_a_stream_is_the_answer_to_a_prompt(client: ollama.Client) -> None:
    whole = client.generate(prompt="def add(", raw=True, **COMMON)
    parts = list(client.generate(prompt="def add(", raw=True, stream=True, **COMMON))
    assert "".join(part.response for part in parts) == whole.response
    assert client.generate(prompt="hello", system="Python.", **COMMON).done


def test_the_chat_is_that_of_the_other_interfaces(client: ollama.Client, url: str) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert found["choices"][0]["message"]["content"] == client.chat(messages=MESSAGES, **COMMON).message.content


def test_formats(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 200}
    answer = client.chat(model=MODEL, messages=MESSAGES, format=schema, options=options)
    assert answer.message.content is not None
    assert answer.message.content.replace(" ", "").replace("\n", "") in ('{"x":true}', '{"x":false}')


def test_a_tool_round(client: ollama.Client) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Bern"}}}
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "get_weather"},
    ]
    answer = client.chat(messages=turns, tools=[WEATHER], **COMMON)
    assert answer.message.content or answer.message.tool_calls


def test_what_is_told_of_models(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    assert "tools" in (client.show(MODEL).capabilities or ())


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="another", messages=MESSAGES)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images: is not supported"):
        client.generate(prompt="What is it?", images=[b"hi"], **COMMON)
    with pytest.raises(ollama.ResponseError):
        client.pull(MODEL)
