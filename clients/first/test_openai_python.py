"""openai-python, with its strict types: every response, chunk and event validates without coercion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from conftest import MODEL
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

MESSAGES: Any = [{"role": "system", "content": "Python."}, {"role": "user", "content": "A function that adds."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bern", "Rome"]},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        yield client


def test_chat_validates_strictly(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=MESSAGES,
        max_completion_tokens=12,
        n=2,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
        seed=3,
    )
    assert raw.headers["x-request-id"]
    found = ChatCompletion.model_validate_json(raw.text, strict=True)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].message.content == found.choices[1].message.content
    assert found.usage is not None
    for choice in found.choices:
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        assert (
            b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode() == choice.message.content
        )


def test_a_stream_is_the_answer_and_ends_with_its_usage(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0.7, "seed": 5}
    whole = client.chat.completions.create(**common)
    chunks = []
    with client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
            chunks.append(chunk)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]


def test_completions_validate_strictly(client: openai.OpenAI) -> None:
    prompts = ["def add(", "class "]
    common: Any = {"model": MODEL, "prompt": prompts, "max_tokens": 6, "n": 2, "logprobs": 2, "temperature": 0}
    raw = client.completions.with_raw_response.create(**common)
    found = Completion.model_validate_json(raw.text, strict=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    # As with OpenAI, the first token of an echoed prompt has null, which the client's types do not have.
    echoed = client.completions.create(**common, echo=True).choices[0]
    assert echoed.text == f"def add({found.choices[0].text}"
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert echoed.logprobs.token_logprobs[0] is None


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"


def test_prediction_is_counted(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**common)
    text = plain.choices[0].message.content or ""
    found = client.chat.completions.create(**common, prediction={"type": "content", "content": text})
    assert found.choices[0].message.content == text
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert found.usage.completion_tokens_details.accepted_prediction_tokens


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call(client: openai.OpenAI, choice: Any, stream: bool) -> None:
    common: Any = {"model": MODEL, "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "temperature": 1.0}
    common |= {"max_completion_tokens": 80, "seed": 1, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**common) as events:
            for _ in events:
                pass
            found: Any = events.get_final_completion()
    else:
        raw = client.chat.completions.with_raw_response.create(**common)
        found = ChatCompletion.model_validate_json(raw.text, strict=True)
    (chosen,) = found.choices
    assert chosen.finish_reason == "tool_calls"
    (call,) = chosen.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Bern", "Rome")
    assert arguments["days"] in (1, 2)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*MESSAGES, chosen.message.model_dump(exclude_none=True), answer]
    after = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_completion_tokens=4)
    assert after.choices[0].finish_reason


class _Point(BaseModel):
    x: bool
    y: bool


def test_parsed_answers(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=_Point, max_completion_tokens=60, temperature=0
    )
    assert isinstance(found.choices[0].message.parsed, _Point)


def test_structured_outputs_of_vllm(client: openai.OpenAI) -> None:
    for form, fits in (
        ({"choice": ["red", "green"]}, lambda text: text in ("red", "green")),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"grammar": 'start: "x" | "y"'}, lambda text: text in ("x", "y")),
        ({"json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
    ):
        found = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=20, extra_body={"structured_outputs": form}
        )
        assert fits(found.choices[0].message.content), form


def test_responses_validate_strictly(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL, input="A function that adds.", instructions="Python.", max_output_tokens=12, temperature=0
    )
    found = Response.model_validate_json(raw.text, strict=True)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output_text
    assert found.usage is not None
    assert found.usage.output_tokens == 12


def test_response_events_validate_and_add_up(client: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "input": [{"role": "user", "content": "A class."}], "max_output_tokens": 16}
    whole = client.responses.create(**common, temperature=0)
    events = []
    with client.responses.create(**common, temperature=0, stream=True) as stream:
        for event in stream:
            TypeAdapter(type(event)).validate_python(event.model_dump(), strict=True)
            events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_a_response_with_a_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    with client.responses.stream(
        model=MODEL,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=80,
        parallel_tool_calls=False,
    ) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    assert found.status == "completed"
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Bern", "Rome")
    after = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        tools=[tool],
        max_output_tokens=4,
    )
    assert after.status in ("completed", "incomplete")
