"""Anthropic's interface over a scripted backend: what becomes of turns, of an answer, and of what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from foretoken import SpecConfig
from foretoken.backend.call import AnswerFailed, Begun, Event, Piece, TokenEvent
from foretoken.errors import ContextLengthError, OverloadedError, UnavailableError
from foretoken.server.api.anthropic import ContentBlocks
from foretoken.server.api.anthropic_request import chat_messages
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.exchange import completed_stop
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.http import JSON, Records, client_of, run

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TAGS = msgspec.structs.replace(INFO, tool_style="tags")
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def post(backend: FakeBackend, path: str, body: Any, config: ApiConfig | None = None) -> tuple[int, Any, Any]:
    """Status, headers, and JSON or text of one request."""

    async def send() -> tuple[int, Any, Any]:
        async with client_of(create_app(backend, config)) as client:
            response = await client.post(path, content=json.dumps(body).encode(), headers=JSON)
            is_json = response.headers["content-type"] == "application/json"
            return response.status_code, response.headers, response.json() if is_json else response.text

    return run(send())


def asked(body: Any, path: str = PATH) -> Any:
    """The call that a body becomes."""
    backend = FakeBackend(info=TAGS)
    status, _, found = post(backend, path, HELLO | body)
    assert status == 200, found
    return backend.calls[0]


def refused(body: Any, path: str = PATH, status: int = 400) -> Any:
    """The error of a body that no engine sees, in Anthropic's envelope."""
    backend = FakeBackend(info=TAGS)
    code, headers, found = post(backend, path, body)
    assert (code, backend.calls) == (status, []), found
    assert found["type"] == "error"
    assert found["request_id"] == headers["request-id"] == headers["x-request-id"]
    return found["error"]


def events_of(text: str) -> list[tuple[str, Any]]:
    """Name and JSON of each event of a stream."""
    found = []
    for part in filter(None, text.split("\n\n")):
        name, _, data = part.partition("\ndata: ")
        found.append((name.removeprefix("event: "), json.loads(data)))
    assert all(name == data["type"] for name, data in found)
    return found


def script(texts: Sequence[str], reason: str = "stop", **stats: Any) -> tuple[Event, ...]:
    """An answer in pieces of one token."""
    pieces = [piece(0, text, step) for step, text in enumerate(texts)]
    return Begun(((1, 2, 3),)), *pieces, ended(0, "".join(texts), reason, len(texts), **stats)


# ---- what is asked


USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}


def test_turns_become_messages() -> None:
    image_free = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    thought = {"type": "thinking", "thinking": "hidden", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    turns = [
        {"role": "user", "content": image_free},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE]},
        {
            "role": "user",
            "content": [result | {"content": [{"type": "text", "text": "bad"}], "is_error": True}, *image_free],
        },
        {"role": "assistant", "content": []},
        {"role": "user", "content": [result]},
    ]
    call = asked({"messages": turns, "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]})
    made = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    told = {"role": "tool", "tool_call_id": "toolu_1", "name": "f"}
    assert call.messages == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "one\ntwo\nthree"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [made]},
        told | {"content": "Error: bad"},
        {"role": "user", "content": "one\ntwo"},
        told | {"content": ""},
    ]


def test_the_beginning_of_an_answer_is_continued() -> None:
    for content in ("{", [{"type": "text", "text": "{"}]):
        call = asked({"messages": [*HELLO["messages"], {"role": "assistant", "content": content}]})
        assert call.messages[-1] == {"role": "assistant", "content": "{"}
        assert call.template_options == {"continue_final_message": True}
    assert asked(HELLO).template_options == {}


def test_many_texts_of_a_turn_are_not_copied_one_by_one() -> None:
    """A text that is copied for each text behind it makes this test take half a minute."""
    long, short = {"type": "text", "text": "a" * (2 << 20)}, {"type": "text", "text": "b"}
    found = chat_messages(None, [{"role": "user", "content": [long, *[short] * 20_000]}])
    assert found[0]["content"] == long["text"] + "\nb" * 20_000
    texts = [{"type": "text", "text": text} for text in ("", "", "a", "", "b", "")]
    assert chat_messages(None, [{"role": "user", "content": texts}])[0]["content"] == "a\n\nb\n"


def test_fields_become_parameters() -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["x", "y"],
        "metadata": {"user_id": "u" * 300, "slice": "code"},
        "service_tier": "standard_only",
        "spec": {"drafter": "ngram", "num_draft": 2},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "boolean"}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    call = asked(body)
    params = call.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 7)
    assert (params.stop_strings, params.slice, params.json_schema) == (("x", "y"), "code", '{"type": "boolean"}')
    assert call.spec == SpecConfig("ngram", num_draft=2)
    assert call.template_options == {"enable_thinking": False, "thinking": False, "reasoning_effort": "high"}
    assert asked({"output_format": {"type": "json_schema", "schema": {}}}).params.json_schema == "{}"


@pytest.mark.parametrize(
    ("choice", "is_shown", "is_held"),
    [
        (None, True, False),
        ({"type": "auto"}, True, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "f"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
def test_tool_choices(choice: Any, is_shown: bool, is_held: bool) -> None:
    call = asked({"tools": [TOOL, TOOL | {"name": "mcp__" + "g" * 80, "type": "custom"}], "tool_choice": choice})
    assert (call.tools is not None, call.params.grammar is not None) == (is_shown, is_held)
    if is_shown:
        schema = TOOL["input_schema"]
        assert call.tools[0] == {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": schema},
        }
    if choice is not None and choice["type"] == "tool":
        assert "mcp__" not in call.params.grammar


# ---- what is answered


def test_a_message() -> None:
    status, headers, found = post(FakeBackend(script(["Hel", "lo"], num_cached_tokens=2)), PATH, HELLO)
    assert status == 200
    assert found["id"] == f"msg_{headers['request-id']}"
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "fake")
    assert found["content"] == [{"type": "text", "text": "Hello"}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    usage = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 2}
    assert found["usage"] == usage | {"service_tier": "standard"}
    assert found["foretoken"]["spec"]["num_emitted"] == 2
    assert "timings" not in found  # llama.cpp's, which it leaves out here too
    assert post(FakeBackend(script(["Hel"], "length")), PATH, HELLO)[2]["stop_reason"] == "max_tokens"
    assert post(FakeBackend((Begun(((1,),)), ended(0, "", num_tokens=0))), PATH, HELLO)[2]["content"] == []


def test_a_stream_of_text() -> None:
    _, headers, text = post(FakeBackend(script(["Hel", "lo"])), PATH, HELLO | {"stream": True})
    assert headers["request-id"]
    events = events_of(text)
    assert [name for name, _ in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    found = [data for _, data in events]
    assert (found[0]["message"]["content"], found[0]["message"]["usage"]["input_tokens"]) == ([], 3)
    assert found[0]["message"]["stop_reason"] is None
    assert found[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [one["delta"] for one in found[3:5]] == [{"type": "text_delta", "text": text} for text in ("Hel", "lo")]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 2
    assert found[-2]["foretoken"]


def test_calls_whole_and_streamed() -> None:
    texts = ["See", ": ", *CALL, "\n", *CALL]
    body = HELLO | {"tools": [TOOL]}
    whole = post(FakeBackend(script(texts), TAGS), PATH, body)[2]
    assert whole["stop_reason"] == "tool_use"
    text, first, second = whole["content"]
    assert text == {"type": "text", "text": "See:"}
    for call in (first, second):
        assert call == {"type": "tool_use", "id": call["id"], "name": "f", "input": {"a": 1}}
        assert call["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    events = events_of(post(FakeBackend(script(texts), TAGS), PATH, body | {"stream": True})[2])
    starts = [data for name, data in events if name == "content_block_start"]
    assert [(one["index"], one["content_block"]["type"]) for one in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert starts[1]["content_block"]["input"] == {}
    deltas = [data for name, data in events if name == "content_block_delta" and data["index"] == 1]
    assert {one["delta"]["type"] for one in deltas} == {"input_json_delta"}
    assert len(deltas) > 1
    assert json.loads("".join(one["delta"]["partial_json"] for one in deltas)) == {"a": 1}
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "reason", "expected"),
    [
        ('{"a": [1, 2', "length", {"a": [1, 2]}),
        ('{"a": "cut', "length", {}),
        ("{a: 1}}</tool_call>", "stop", {"INVALID_JSON": "{a: 1}"}),
        ('{"a": "\\ud83d"}}</tool_call>', "stop", {"INVALID_JSON": '{"a": "\\ud83d"}'}),
        ("null}</tool_call>", "stop", {}),
    ],
)
def test_calls_that_are_cut_or_malformed(arguments: str, reason: str, expected: Any) -> None:
    texts = ['<tool_call>{"name": "f", "arguments": ', arguments]
    found = post(FakeBackend(script(texts, reason), TAGS), PATH, HELLO | {"tools": [TOOL]})[2]
    assert found["content"][0]["input"] == expected
    assert found["stop_reason"] == ("max_tokens" if reason == "length" else "tool_use")


def test_a_stop_sequence_cuts_a_call_like_the_length() -> None:
    """Ollama's interface, too, has the arguments as far as they came."""
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, 2'
    pieces = (piece(0, text), Piece(0, "", (token("]"),)))  # the token that completes the stop string writes nothing
    backend = FakeBackend((Begun(((1, 2, 3),)), *pieces, ended(0, text)), TAGS)
    found = post(backend, PATH, HELLO | {"tools": [TOOL], "stop_sequences": ["]"]})[2]
    assert (found["content"][0]["input"], found["stop_sequence"]) == ({"a": [1, 2]}, "]")
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"stream": False, "messages": HELLO["messages"], "tools": tools, "options": {"stop": "]"}}
    found = post(backend, "/api/chat", body, ApiConfig(ollama=True))[2]
    assert found["message"]["tool_calls"][0]["function"]["arguments"] == {"a": [1, 2]}


def test_blocks_without_arguments() -> None:
    blocks = ContentBlocks()
    part = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert len([*blocks.add([{"tool_calls": [part]}]), *blocks.close()]) == 2
    assert blocks.content == [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}]


def token(text: str, data: bytes | None = None, token_id: int = 7) -> TokenEvent:
    return TokenEvent(token_id, text, text.encode() if data is None else data, "plain")


def test_the_stop_sequence_is_the_one_that_the_last_token_completed() -> None:
    tokens = [token("a b"), token(" c"), token("d e")]
    assert completed_stop(tokens, ["x", "cd", "d"]) == "cd"
    assert completed_stop(tokens, ["b", "a b c"]) is None
    assert completed_stop(tokens, ["a b cd e"]) == "a b cd e"
    halves = [token("\ufffd", "é".encode()[:1]), token("\ufffd", "é".encode()[1:])]
    assert completed_stop(halves, ["é"]) == "é"
    begun = (Begun(((1,),)), piece(0, "x"), msgspec.structs.replace(piece(0, ""), tokens=(token("END."),)))
    stopped = post(FakeBackend((*begun, ended(0, "x"))), PATH, HELLO | {"stop_sequences": ["no", "END"]})[2]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    last = (Begun(((1,),)), msgspec.structs.replace(piece(0, ""), tokens=(token("END", token_id=0),)))
    natural = post(FakeBackend((*last, ended(0, ""))), PATH, HELLO | {"stop_sequences": ["END"]})[2]
    assert (natural["stop_reason"], natural["stop_sequence"]) == ("end_turn", None)


def test_counted_tokens() -> None:
    plain = post(FakeBackend(info=TAGS), COUNT, {"messages": HELLO["messages"]})
    assert (plain[0], list(plain[2])) == (200, ["input_tokens"])
    with_tools = {"messages": HELLO["messages"], "tools": [TOOL], "thinking": {"type": "disabled"}}
    count = post(FakeBackend(info=TAGS), COUNT, with_tools)[2]["input_tokens"]
    assert count > plain[2]["input_tokens"] + len(str(TOOL["input_schema"]))
    assert (
        post(FakeBackend(info=TAGS), COUNT, {"messages": HELLO["messages"]}, ApiConfig(max_request_tokens=2))[0] == 200
    )


# ---- what is refused


def content(*blocks: Any, role: str = "user") -> Any:
    return HELLO | {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "go on"}]}


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        (content({"type": "image", "source": {}}), "messages.0.content.0.type", "image is not supported"),
        (content({"type": "text", "text": "a"}, {"type": "document"}), "messages.0.content.1.type", "document is not"),
        (content({"type": "server_tool_use"}, role="assistant"), "messages.0.content.0.type", "server_tool_use is"),
        (content({"type": "secret word"}), "messages.0.content.0.type", "has text and tool_result"),
        (
            content({"type": "tool_use", "id": "1", "name": "f", "input": {}}),
            "messages.0.content.0.type",
            "tool_use is",
        ),
        (content({"type": "tool_use", "id": "1", "name": "f"}, role="assistant"), "messages.0.content.0", "input"),
        (content({"type": "tool_result", "tool_use_id": "1"}), "messages.0.content.0.tool_use_id", "before it"),
        (content({"type": "text"}), "messages.0.content.0.text", "must be a text"),
        (content("text"), "messages.0.content.0", "object with a type"),
        (content(), "messages.0.content", "not empty"),
        (HELLO | {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "user, assistant, system"),
        (
            HELLO | {"messages": [*HELLO["messages"], {"role": "assistant", "content": [USE]}]},
            "messages.1.content",
            "tool_result",
        ),
        (HELLO | {"system": [{"type": "image"}]}, "system.0.type", "image is not supported"),
        (HELLO | {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type", "web_search_20250305 is"),
        (HELLO | {"tools": [{"type": "a secret", "name": "w"}]}, "tools.0.type", "tools.0.type: is not supported"),
        (HELLO | {"tools": [{"name": "w"}]}, "tools.0.input_schema", "is missing"),
        (HELLO | {"tools": [TOOL, TOOL]}, "tools", "same name"),
        (HELLO | {"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading", "leave it out"),
        (HELLO | {"tools": [TOOL | {"input_examples": [{}]}]}, "tools.0.input_examples", "description"),
        (HELLO | {"tools": [TOOL | {"allowed_callers": ["code"]}]}, "tools.0.allowed_callers", "direct"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "names one of the tools"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", "not among"),
        (HELLO | {"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        (HELLO | {"container": "c"}, "container", "leave it out"),
        (HELLO | {"mcp_servers": [{}]}, "mcp_servers", "tools"),
        (HELLO | {"inference_geo": "us"}, "inference_geo", "leave it out"),
        (
            HELLO | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits.0.type",
            "no context is edited",
        ),
        (HELLO | {"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences", "stop_sequences: must be at most 4"),
        (HELLO | {"stop_sequences": ["a"], "stop": "a"}, "stop_sequences", "leave stop out"),
        (HELLO | {"temperature": -1}, "temperature", "got -1"),
        (HELLO | {"n": 2}, "n", "one answer"),
        (HELLO | {"spec": {"drafter": "none such"}}, "spec.drafter", "there is no such drafter"),
        (HELLO | {"messages": []}, "messages", "at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(path: str, body: Any, param: str, shown: str) -> None:
    error = refused(body, path)
    assert (error["type"], error["details"]["param"]) == ("invalid_request_error", param), error
    assert error["message"].startswith(f"{param}: "), error
    assert shown in error["message"]
    assert "secret" not in error["message"]


def test_fields_that_are_needed() -> None:
    assert refused({"messages": HELLO["messages"]})["details"] == {"error_code": "missing_field", "param": "max_tokens"}
    assert refused(HELLO | {"max_tokens": 0})["message"].endswith("(got 0)")
    assert refused(HELLO | {"model": "another"}, status=404)["type"] == "not_found_error"
    assert refused(HELLO, "/v1/messages/batches", status=404)["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code"),
    [
        (OverloadedError("full"), 529, "overloaded_error", "queue_full"),
        (UnavailableError("gone"), 503, "overloaded_error", "restarting"),
        (ValueError("broken"), 500, "api_error", "internal_error"),
    ],
)
def test_errors_of_the_server(refusal: Exception, status: int, kind: str, code: str) -> None:
    backend, records = FakeBackend(), Records()
    backend.refusal = refusal

    async def send() -> Any:
        async with client_of(create_app(backend, observers=[records])) as client:
            return await client.post(PATH, json=HELLO)

    found = run(send())
    assert found.status_code == status
    assert (found.json()["error"]["type"], found.json()["error"]["details"]["error_code"]) == (kind, code)
    assert [record.status for record in records.all] == [status]


def test_a_long_prompt_is_told_in_anthropics_words() -> None:
    backend = FakeBackend()
    backend.refusal = ContextLengthError("prompt", "3000 tokens", "shorten it")
    status, _, found = post(backend, PATH, HELLO)
    assert status == 400
    assert found["error"]["message"] == "prompt is too long: 3000 tokens > 2047 maximum"
    assert found["error"]["details"]["n_prompt_tokens"] == 3000


def test_an_error_in_a_stream_is_its_last_event() -> None:
    failed = (Begun(((1,),)), piece(0, "a"), AnswerFailed(0, "EngineError", "x"))
    status, headers, text = post(FakeBackend(failed), PATH, HELLO | {"stream": True})
    assert status == 200
    name, last = events_of(text)[-1]
    assert name == "error"
    assert (last["error"]["type"], last["request_id"]) == ("api_error", headers["request-id"])
    early = post(FakeBackend((Begun(((1,),)), AnswerFailed(0, "EngineError", "x"))), PATH, HELLO | {"stream": True})
    assert (early[0], early[2]["error"]["type"]) == (500, "api_error")


def test_keys_by_both_headers() -> None:
    app = Guard(create_app(FakeBackend()), GuardConfig(api_key="a-long-key"))

    async def send(headers: dict[str, str]) -> Any:
        async with client_of(app) as client:
            return await client.post(PATH, json=HELLO, headers={"host": "localhost", **headers})

    version = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-2025-01-01"}
    assert run(send({"x-api-key": "a-long-key", **version})).status_code == 200
    assert run(send({"authorization": "Bearer a-long-key"})).status_code == 200
    wrong = run(send({"x-api-key": "another-key"}))
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    assert wrong.json()["request_id"] == wrong.headers["request-id"]
    assert "x-api-key" in wrong.json()["error"]["message"]
