"""langchain-openai."""

from __future__ import annotations

from typing import Literal

import pytest
from conftest import MODEL
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr

MESSAGES = [SystemMessage("Python."), HumanMessage("A function that adds.")]


@tool
def get_weather(city: Literal["Bern", "Rome"]) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


class Switch(BaseModel):
    """A switch."""

    on: bool


@pytest.fixture(scope="module")
def chat(base_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=base_url, api_key=SecretStr("none"), temperature=0, max_completion_tokens=40
    )


def test_invoke_and_stream_agree(chat: ChatOpenAI) -> None:
    whole = chat.invoke(MESSAGES)
    pieces = list(chat.stream(MESSAGES, stream_usage=True))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.usage_metadata is not None
    assert [piece.usage_metadata for piece in pieces if piece.usage_metadata][-1]["output_tokens"] == (
        whole.usage_metadata["output_tokens"]
    )


def test_batch(chat: ChatOpenAI) -> None:
    first, second = chat.batch([MESSAGES, MESSAGES])
    assert first.content == second.content


def test_a_tool_round(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="get_weather")
    found = bound.invoke(MESSAGES)
    assert isinstance(found, AIMessage)
    (call,) = found.tool_calls
    assert call["args"]["city"] in ("Bern", "Rome")
    merged = None
    for piece in bound.stream(MESSAGES):
        merged = piece if merged is None else merged + piece
    assert merged is not None
    assert [(one["name"], one["args"]) for one in merged.tool_calls] == [(call["name"], call["args"])]
    answer = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    after = chat.bind_tools([get_weather]).invoke([*MESSAGES, found, answer])
    assert isinstance(after, AIMessage)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]) -> None:
    assert isinstance(chat.with_structured_output(Switch, method=method).invoke(MESSAGES), Switch)


def test_text_completion(base_url: str) -> None:
    llm = OpenAI(model=MODEL, base_url=base_url, api_key=SecretStr("none"), temperature=0, max_tokens=8)
    assert llm.invoke("def add(") == "".join(llm.stream("def add("))


def test_responses(base_url: str) -> None:
    chat = ChatOpenAI(
        model=MODEL, base_url=base_url, api_key=SecretStr("none"), temperature=0, use_responses_api=True, max_tokens=16
    )
    assert "".join(piece.text for piece in chat.stream(MESSAGES)) == chat.invoke(MESSAGES).text
