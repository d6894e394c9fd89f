"""Tools, templates and responses over HTTP: the reference target, its template takes tools."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import msgspec
import pytest

from foretoken.backend.call import AnswerFailed, Begun
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.server.api.app import create_app
from foretoken.text import chat_template
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.http import client_of, run
from tests.server.structured import MESSAGES, SWITCH, TOOL, Server, engine, events_of, server

__all__ = ["engine", "server"]  # fixtures

CALL = '{"name": "f", "arguments": {"a": [1, {"b": 2}]}}'
TEXT = f"Hi <tool_call>{CALL}</tool_call>\nand on"


def merged(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    content, calls, reason = "", list[dict[str, Any]](), ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return content, calls, reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "switch"}}])
@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_forced_calls_fit_their_schema_streamed_or_not(server: Server, choice: Any, drafter: str | None) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "spec": {"drafter": drafter}}
    if choice == "required":
        fields["parallel_tool_calls"] = False
    whole = server.chat(**fields)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "switch"
    assert json.loads(call["function"]["arguments"])["level"] in ("low", "high")
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == "tool_calls"
    content, calls, reason = merged(server.chat(**fields, stream=True))
    assert (content, calls, reason) == ("", [call["function"]], "tool_calls")
    after = [*MESSAGES, whole["message"], {"role": "tool", "tool_call_id": call["id"], "content": "on"}]
    assert server.chat(messages=after, tools=[TOOL], max_completion_tokens=2)["choices"]


@pytest.mark.parametrize("fields", [{"max_completion_tokens": 6}, {"stop": ['"name"']}])
def test_a_forced_call_that_is_cut_off_in_its_beginning_leaves_no_text(server: Server, fields: dict[str, Any]) -> None:
    asked = {"tools": [TOOL], "tool_choice": "required", **fields}
    choice = server.chat(**asked)["choices"][0]
    assert (choice["message"]["content"], choice["message"].get("tool_calls")) == ("", None)
    assert choice["finish_reason"] == ("length" if "max_completion_tokens" in fields else "stop")
    assert merged(server.chat(**asked, stream=True)) == ("", [], choice["finish_reason"])


def test_strict_functions_and_single_calls_leave_text_free(server: Server) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    for fields in ({"tools": [strict]}, {"tools": [TOOL], "parallel_tool_calls": False}):
        free = server.chat(tools=[TOOL], max_completion_tokens=12)["choices"][0]["message"]["content"]
        found = server.chat(**fields, max_completion_tokens=12)["choices"][0]["message"]
        assert found["content"] == free


def test_a_form_beside_tools(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SWITCH}}
    message = server.chat(tools=[TOOL], response_format=form, parallel_tool_calls=False)["choices"][0]["message"]
    text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    assert set(json.loads(text)) == {"on", "level"}


def test_tools_that_cannot_be_offered(server: Server, engine: AsyncEngine) -> None:
    without = LocalBackend(engine, "reference")
    without.info = msgspec.structs.replace(without.info, tool_style=None)
    refused = Server(without).post("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_feature")
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ):
        reply = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"].startswith(param), reply.text


def test_template_abuse(server: Server, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 21: clients bring no templates and no options of their own; a template that loops ends at its deadline."""
    for fields in (
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"enable_thinking": {"a": 1}}},
    ):
        reply = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"].startswith("chat_template")
    tokenizer = engine.llm.tokenizer
    assert tokenizer is not None
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    worker = chat_template._Worker()
    monkeypatch.setattr(chat_template, "CPU_S", 0.3)
    monkeypatch.setattr(chat_template, "_worker", worker)
    monkeypatch.setitem(tokenizer.__dict__, "_templates", {"default": loops})
    try:
        reply = server.post("/v1/chat/completions", {"messages": MESSAGES})
    finally:
        worker.close()
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "messages"


def test_a_response_is_the_chat_in_another_shape(server: Server) -> None:
    chat = server.chat(messages=[{"role": "system", "content": "Python."}, *MESSAGES], max_completion_tokens=12)
    body = {"input": MESSAGES[0]["content"], "instructions": "Python.", "max_output_tokens": 12, "temperature": 0}
    found = server.post("/v1/responses", body).json()
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 12
    events = events_of(server.post("/v1/responses", body | {"stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == found["output"][0]["content"][0]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_a_response_has_the_log_probabilities_of_the_chat(server: Server) -> None:
    """Those of the token that completed a stop string, too, which writes nothing; streamed or not."""
    text = server.chat(max_completion_tokens=12)["choices"][0]["message"]["content"]
    for stop in (text[:1], text[5:8]):
        chat = server.chat(max_completion_tokens=12, stop=[stop], logprobs=True, spec={"drafter": None})["choices"][0]
        expected = [(entry["token"], entry["logprob"]) for entry in chat["logprobs"]["content"]]
        body = {"input": MESSAGES, "max_output_tokens": 12, "temperature": 0, "stop": [stop], "spec": {"drafter": None}}
        body |= {"include": ["message.output_text.logprobs"]}
        events = events_of(server.post("/v1/responses", body | {"stream": True}))
        for found in (server.post("/v1/responses", body).json(), events[-1]["response"]):
            (part,) = found["output"][0]["content"]
            assert part["text"] == chat["message"]["content"]
            assert [(entry["token"], entry["logprob"]) for entry in part["logprobs"]] == expected


def test_a_response_with_calls(server: Server) -> None:
    tool = {"type": "function", **TOOL["function"]}
    body = {
        "input": "Switch.",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    found = server.post("/v1/responses", body).json()
    (call,) = found["output"]
    assert (call["type"], call["name"], found["status"]) == ("function_call", "switch", "completed")
    assert set(json.loads(call["arguments"])) == {"on", "level"}
    events = events_of(server.post("/v1/responses", body | {"stream": True}))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call["arguments"]
    turn = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "on"}]
    after = server.post("/v1/responses", {"input": [*MESSAGES, *turn], "tools": [tool], "max_output_tokens": 2})
    assert after.status_code == 200, after.text


def test_responses_keep_no_state(server: Server) -> None:
    for fields, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "word " * 5000}, "input"),
    ):
        reply = server.post("/v1/responses", {"input": "x", **fields})
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == param, reply.text


def test_a_response_that_fails_is_a_code_or_a_last_event() -> None:
    """Of its own, before the error that all streams end with; its field has the name of the request."""
    long = AnswerFailed(0, "InputError", "too long", "messages")

    async def ask(*script: Any) -> httpx2.Response:
        async with client_of(create_app(FakeBackend((Begun(((1,),)), *script)))) as client:
            return await client.post("/v1/responses", json={"input": "a", "stream": True})

    refused = run(ask(long))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    begun = run(ask(piece(0, "He"), long))
    *_, failed, last = events = events_of(begun)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in events[:-1]] == list(range(len(events) - 1))
    assert "event: response.failed\n" in begun.text
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "invalid_value", "message": "input: too long"}
    (item,) = failed["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "He")
    assert (last["error"]["code"], last["error"]["param"]) == ("invalid_value", "input")


@pytest.mark.parametrize("parts", [("Hi ", "<tool_call>", CALL[:20], CALL[20:] + "</tool_call>\nand on"), (TEXT,)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_texts_and_calls_of_one_step_keep_their_order(parts: tuple[str, ...], is_streamed: bool) -> None:
    """A step of several tokens may end a call and go on with text."""
    pieces = [piece(0, part, step) for step, part in enumerate(parts)]
    backend = FakeBackend((Begun(((1,),)), *pieces, ended(0, TEXT)), msgspec.structs.replace(INFO, tool_style="tags"))
    app = create_app(backend)
    function = {"name": "f", "parameters": {"type": "object"}}
    asked: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "x", "tools": [{"type": "function", **function}]},
        "/v1/messages": {
            "messages": MESSAGES,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
    }

    async def post(path: str) -> httpx2.Response:
        async with client_of(app) as client:
            reply = await client.post(path, json=asked[path] | {"stream": is_streamed})
            assert reply.status_code == 200, reply.text
            return reply

    response = run(post("/v1/responses"))
    made = events_of(response)[-1]["response"] if is_streamed else response.json()
    items = [one.get("arguments") or one["content"][0]["text"] for one in made["output"]]
    assert items == ["Hi", '{"a": [1, {"b": 2}]}', "and on"]
    message = run(post("/v1/messages"))
    blocks = message.json()["content"] if not is_streamed else blocks_of(events_of(message))
    assert [block.get("text") or block["input"] for block in blocks] == ["Hi", {"a": [1, {"b": 2}]}, "and on"]


def blocks_of(events: list[Any]) -> list[dict[str, Any]]:
    """The content of a streamed message."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[-1]["text"] = blocks[-1].get("text", "") + event["delta"].get("text", "")
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
    return [block | ({"input": json.loads(block["json"])} if block["json"] else {}) for block in blocks]


def test_a_call_that_a_stop_string_cuts_is_not_made(server: Server) -> None:
    """A client would run it after "tool_calls"; a whole call before the stop string is made, as llama.cpp has it."""
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (whole,) = server.chat(**fields)["choices"]
    arguments = whole["message"]["tool_calls"][0]["function"]["arguments"]
    place = arguments.index('"level"')
    cut = server.chat(**fields, stop=['"level"'])["choices"][0]
    assert cut["message"]["tool_calls"][0]["function"]["arguments"].strip() == arguments[:place].strip()
    assert cut["finish_reason"] == "stop"
    _, calls, reason = merged(server.chat(**fields, stop=['"level"'], stream=True))
    assert (calls[0]["arguments"].strip(), reason) == (arguments[:place].strip(), "stop")
    ended_behind = server.chat(**fields, stop=["</tool_call>"])["choices"][0]
    assert (ended_behind["message"]["tool_calls"][0]["function"]["arguments"], ended_behind["finish_reason"]) == (
        arguments,
        "tool_calls",
    )
