"""Ollama's interface over a scripted backend: what is asked, what becomes of an answer, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from foretoken.backend.call import AnswerFailed, Begun, Event
from foretoken.errors import ContextLengthError, OverloadedError
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.ollama_request import OllamaChat, as_chat
from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import GuardConfig
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.http import JSON, Records, client_of, run

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: Any = {"model": "fake", "stream": False, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
TAGS = msgspec.structs.replace(INFO, tool_style="tags", num_parameters=134_500_000)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ON = ApiConfig(ollama=True)


def ask(backend: FakeBackend, path: str, body: Any, config: ApiConfig = ON, records: Any = ()) -> tuple[int, Any]:
    """Status, and JSON, or the lines of a stream."""

    async def send() -> tuple[int, Any]:
        async with client_of(create_app(backend, config, records)) as client:
            if body is None:
                response = await client.get(path)
            else:
                response = await client.post(path, content=json.dumps(body).encode(), headers=JSON)
            if response.headers["content-type"] == "application/x-ndjson":
                assert response.text.endswith("\n")
                return response.status_code, [json.loads(line) for line in response.text.splitlines()]
            return response.status_code, response.json()

    return run(send())


def asked(body: Any, path: str = CHAT, info: Any = TAGS) -> Any:
    """The call that a body becomes."""
    backend = FakeBackend(info=info)
    status, found = ask(backend, path, {"stream": False} | body)
    assert status == 200, found
    return backend.calls[0]


def script(texts: Sequence[str], reason: str = "stop", **stats: Any) -> tuple[Event, ...]:
    """An answer in pieces of one token."""
    pieces = [piece(0, text, step) for step, text in enumerate(texts)]
    return Begun(((1, 2, 3),)), *pieces, ended(0, "".join(texts), reason, len(texts), **stats)


def test_options_become_parameters() -> None:
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["x"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_ctx": 4096,
    }
    params = asked(HELLO | {"options": options, "spec": {"drafter": "ngram", "num_draft": 2}}).params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0.5, 7, 0.9)
    assert (params.min_p, params.seed, list(params.stop)) == (0.1, 3, ["x"])
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.5, -0.5)
    free = asked(HELLO | {"options": {"num_predict": -1, "seed": -1}}).params
    assert (free.max_tokens, free.seed) == (INFO.max_model_len, None)


@pytest.mark.parametrize(
    ("form", "schema"),
    [("json", {"type": "object"}), ({"type": "integer"}, {"type": "integer"}), ("", None), (None, None)],
)
def test_formats_hold_the_answer(form: Any, schema: Any) -> None:
    held = asked(HELLO | {"format": form}).params.json_schema
    assert (None if held is None else json.loads(held)) == schema


def test_turns_become_messages() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "thinking": "hidden", "tool_calls": [call, call]},
        {"role": "tool", "content": "one", "tool_name": "f"},
        {"role": "tool", "content": "two"},
    ]
    found = asked({"messages": turns, "tools": [TOOL], "think": False})
    made = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": f"call_2_{one}"} | made for one in range(2)]},
        {"role": "tool", "content": "one", "tool_call_id": "call_2_0", "name": "f"},
        {"role": "tool", "content": "two", "tool_call_id": "call_2_1", "name": "f"},
    ]
    assert found.tools[0]["function"]["name"] == "f"
    assert found.template_options == {"enable_thinking": False, "thinking": False}


def test_the_beginning_of_an_answer_is_continued() -> None:
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    assert asked({"messages": begun}).template_options == {"continue_final_message": True}
    assert asked({"messages": begun[:1]}).template_options == {}


def test_results_find_their_calls_without_looking_through_all_of_them() -> None:
    """A search among all calls for each result makes this test take many times as long."""
    names = [f"f{place % 5000}" for place in range(10_000)]
    calls = [{"function": {"name": name}} for name in names]
    results = [{"role": "tool", "content": "x", "tool_name": name} for name in reversed(names[5000:])]
    results += [{"role": "tool", "content": "x"}] * 4999 + [{"role": "tool", "content": "x", "tool_name": "f4999"}]
    body = OllamaChat.model_validate({"messages": [{"role": "assistant", "tool_calls": calls}, *results]})
    found = [message["tool_call_id"] for message in as_chat(body).messages[1:]]
    assert found[:5000] == [f"call_0_{place}" for place in reversed(range(5000))]
    assert found[5000:] == [f"call_0_{place}" for place in range(5000, 10_000)]


def test_a_prompt_is_a_message_or_the_whole_text() -> None:
    templated = asked({"prompt": "hello", "system": "Be brief."}, GENERATE)
    assert [message["role"] for message in templated.messages] == ["system", "user"]
    for body, info in (({"prompt": "hello", "raw": True}, TAGS), ({"prompt": "hello"}, _untemplated())):
        whole = asked(body, GENERATE, info)
        assert (whole.messages, list(whole.prompts)) == (None, ["hello"])
        assert whole.params.max_tokens == INFO.max_model_len
    filled = asked({"prompt": "ab", "suffix": "c"}, GENERATE, msgspec.structs.replace(TAGS, fim_tokens=((1,), 2, 3)))
    assert list(filled.prompts) == [[1, 0, 1, 2, 0, 3]]


def _untemplated() -> Any:
    return msgspec.structs.replace(TAGS, has_chat_template=False)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_stream_is_the_answer(path: str) -> None:
    body = HELLO if path == CHAT else {"prompt": "hello"}
    texts = ["one", " two", ""]
    status, whole = ask(FakeBackend(script(texts, "length")), path, body | {"stream": False})
    lines = ask(FakeBackend(script(texts, "length")), path, body | {"stream": True})[1]
    assert status == 200
    assert [line["done"] for line in lines] == [False, False, True]

    def text(line: Any) -> str:
        return str(line["message"]["content"] if path == CHAT else line["response"])

    assert "".join(map(text, lines)) == text(whole) == "one two"
    timed = {"created_at", "timings", "metrics"}
    last = lines[-1] | ({"message": whole["message"]} if path == CHAT else {"response": whole["response"]})
    assert {name: last[name] for name in last.keys() - timed} == {name: whole[name] for name in whole.keys() - timed}
    assert (whole["done_reason"], whole["eval_count"], whole["prompt_eval_count"]) == ("length", 3, 3)
    assert (whole["total_duration"], whole["prompt_eval_duration"]) == (30_000_000, 19_000_000)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_the_body_is_json_whatever_its_type(kind: str | None) -> None:
    """LiteLLM names no content type, and curl's `-d`, as Ollama's documentation has it, that of a form."""

    async def post(path: str, **more: str) -> int:
        headers = more | ({} if kind is None else {"content-type": kind})
        app = Guard(create_app(FakeBackend(script(["one"])), ON), GuardConfig(allowed_hosts=("test",)))
        async with client_of(app) as client:
            return (await client.post(path, content=json.dumps(HELLO).encode(), headers=headers)).status_code

    assert run(post(CHAT)) == 200
    assert run(post("/v1/chat/completions")) == 415
    assert run(post(CHAT, origin="https://other.example")) == 403


def test_streams_are_the_default() -> None:
    assert ask(FakeBackend(script(["one"])), GENERATE, {"prompt": "hello"})[1][-1]["done"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_whole(stream: bool) -> None:
    backend = FakeBackend(script(["So: ", *CALL]), info=TAGS)
    found = ask(backend, CHAT, HELLO | {"tools": [TOOL], "stream": stream})[1]
    lines = found if stream else [found]
    assert "".join(line["message"]["content"] for line in lines).strip() == "So:"
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [{"function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]
    assert lines[-1]["done_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_surrogate_pair_in_a_call_is_no_json(stream: bool) -> None:
    backend = FakeBackend(script([*CALL.replace("1", '"\\ud83d"')]), info=TAGS)
    status, found = ask(backend, CHAT, HELLO | {"tools": [TOOL], "stream": stream})
    assert status == 200
    (call,) = (found[-1] if stream else found)["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"INVALID_JSON": '{"a": "\\ud83d"}'}


def test_a_call_that_was_cut_off_is_dropped_streamed_or_not() -> None:
    texts = ["So", *CALL[: CALL.index(', "arguments')]]
    whole = ask(FakeBackend(script(texts, "length"), info=TAGS), CHAT, HELLO | {"tools": [TOOL]})[1]
    lines = ask(FakeBackend(script(texts, "length"), info=TAGS), CHAT, HELLO | {"tools": [TOOL], "stream": True})[1]
    assert whole["message"]["content"] == "".join(line["message"]["content"] for line in lines) == "So"


def test_log_probabilities() -> None:
    lines = ask(FakeBackend(script(["one"])), CHAT, HELLO | {"stream": True, "logprobs": True})[1]
    assert [entry["token"] for line in lines for entry in line["logprobs"]] == ["one"]


def test_nothing_asked_is_a_load() -> None:
    for path, body in ((CHAT, {"model": "fake:latest"}), (GENERATE, {"model": "fake"})):
        backend, records = FakeBackend(), Records()
        status, found = ask(backend, path, body, records=(records,))
        assert (status, found["done"], found["done_reason"], backend.calls) == (200, True, "load", [])
        assert not records.all, "nothing was refused"


def test_what_is_told_of_the_model() -> None:
    backend = FakeBackend(info=TAGS)
    (listed,) = ask(backend, "/api/tags", None)[1]["models"]
    assert (listed["model"], listed["details"]["parameter_size"]) == ("fake", "134.5M")
    assert ask(backend, "/api/ps", None)[1]["models"][0]["name"] == "fake"
    shown = ask(backend, "/api/show", {"model": "fake:latest"})[1]
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["foretoken.context_length"] == INFO.max_model_len
    assert ask(backend, "/api/version", None)[1]["version"].count(".") == 2
    assert ask(backend, "/api/show", {"model": "another"})[0] == 404


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
def test_a_name_is_taken_with_its_tag_and_without(name: str) -> None:
    info = msgspec.structs.replace(INFO, name=name)
    for path, body in ((CHAT, HELLO), ("/api/show", {}), ("/v1/completions", {"prompt": "?", "max_tokens": 2})):
        for asked in ("fake", "fake:latest"):
            found = ask(FakeBackend(info=info), path, {"stream": False, **body, "model": asked})
            assert found[0] == 200, found
        assert ask(FakeBackend(info=info), path, body | {"model": "fake:8b"})[0] == 404


def test_beside_llama_cpps_interface_any_name_of_a_model_is_taken() -> None:
    both = ApiConfig(ollama=True, llama_cpp=True)
    for path, body in (("/api/show", {}), (CHAT, HELLO)):
        assert ask(FakeBackend(), path, body | {"model": "another"}, both)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        (CHAT, HELLO | {"model": "another"}, 404, "model"),
        (CHAT, HELLO | {"format": "yaml"}, 400, "format"),
        (CHAT, HELLO | {"options": {"mirostat": 2}}, 400, "options.mirostat"),
        (CHAT, HELLO | {"options": {"num_predict": 0}}, 400, "options.num_predict"),
        (CHAT, HELLO | {"options": {"temperature": "hot"}}, 400, "options.temperature"),
        (CHAT, {"messages": [{"role": "user", "content": "?", "images": ["aGk="]}]}, 400, "messages.0.images"),
        (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, 400, "messages.0.tool_name"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages.0.tool_calls.0"),
        (CHAT, HELLO | {"n": 2}, 400, "n:"),
        (GENERATE, {"prompt": "?", "images": ["aGk="]}, 400, "images"),
        (GENERATE, {"prompt": "?", "template": "{{ .Prompt }}"}, 400, "template"),
        (GENERATE, {"prompt": "?", "context": [1]}, 400, "context"),
        (GENERATE, {"prompt": "?", "raw": True, "system": "s"}, 400, "system"),
        (GENERATE, {"prompt": "?", "suffix": "s"}, 400, "suffix"),
        ("/api/pull", {"model": "fake"}, 404, "Not Found"),
    ],
)
def test_what_is_refused(path: str, body: Any, status: int, named: str) -> None:
    backend = FakeBackend(info=TAGS)
    code, found = ask(backend, path, body)
    assert (code, backend.calls) == (status, []), found
    assert found.keys() == {"error", "code"}
    assert named in found["error"]


def test_unknown_options_are_refused_where_the_server_is_strict() -> None:
    body = HELLO | {"options": {"warmth": 1}}
    assert ask(FakeBackend(), CHAT, body)[0] == 200
    status, found = ask(FakeBackend(), CHAT, body, ApiConfig(ollama=True, strict=True))
    assert (status, found["code"]) == (400, "unknown_field")


def test_errors_end_a_stream_in_its_own_form() -> None:
    texts = (Begun(((1,),)), piece(0, "one"), AnswerFailed(0, "NumericsError", "not finite"))
    lines = ask(FakeBackend(texts), CHAT, HELLO | {"stream": True})[1]
    assert lines[0]["message"]["content"] == "one"
    assert lines[-1].keys() == {"error", "code"}
    records = Records()
    for error, status in ((OverloadedError("full"), 429), (ContextLengthError("prompt", "9 tokens", "shorten"), 400)):
        backend = FakeBackend()
        backend.refusal = error
        assert ask(backend, CHAT, HELLO | {"stream": True}, records=(records,))[0] == status
    assert [one.route for one in records.all] == [CHAT, CHAT]


def test_the_interface_is_there_when_asked_for() -> None:
    status, found = ask(FakeBackend(), CHAT, HELLO, ApiConfig())
    assert (status, found["code"]) == (404, "route_not_found")
