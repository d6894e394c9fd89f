"""Structured answers, tools, responses and tokens over HTTP: the reference target, its template takes tools."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from foretoken import LLM, EngineConfig, SamplingParams, SpecConfig, registry
from foretoken.backend.local import LocalBackend, build_engine
from foretoken.engine.async_engine import AsyncEngine
from foretoken.model.names import model_folder
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from foretoken.text import chat_template, structure
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.specs import spec_of
from tests.helpers.usual import some_of

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "A function that adds."}]
SWITCH: dict[str, Any] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "switch", "parameters": SWITCH}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = tmp_path_factory.mktemp("model") / "reference"
    shutil.copytree(ROOT / "tests/reference/target", folder)
    shutil.copy(ROOT / "clients/chat_template.jinja", folder)
    with LLM(str(folder), dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        yield engine


class Server:
    """An application without a socket."""

    def __init__(self, backend: LocalBackend, config: ApiConfig | None = None) -> None:
        self.backend = backend
        self.app = create_app(backend, config)

    def post(self, path: str, body: object) -> httpx2.Response:
        return asyncio.run(self.posted(path, body))

    async def posted(self, path: str, body: object) -> httpx2.Response:
        content = body if isinstance(body, str) else json.dumps(body)
        transport = httpx2.ASGITransport(self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    def chat(self, **fields: Any) -> Any:
        body = {"messages": MESSAGES, "temperature": 0, "max_completion_tokens": 60, **fields}
        reply = self.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        return events_of(reply) if fields.get("stream") else reply.json()


def events_of(reply: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def server(engine: AsyncEngine) -> Server:
    return Server(LocalBackend(engine, "reference"))


# ---- forms of answers


def test_the_grammar_engine_starts_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it and handing it the vocabulary keep every thread waiting: it is done while the engine is built. What
    is left for requests is done in the threads that prepare them.
    """
    built, compiled = list[str](), list[str]()
    build, compile_ = structure.build_vocabulary, structure.StructureCompiler.compile

    def building(*given: Any) -> Any:
        built.append(threading.current_thread().name)
        return build(*given)

    def compiling(self: structure.StructureCompiler, params: SamplingParams) -> Any:
        compiled.append(threading.current_thread().name)
        return compile_(self, params)

    monkeypatch.setattr(structure, "build_vocabulary", building)
    monkeypatch.setattr(structure.StructureCompiler, "compile", compiling)
    config = EngineConfig("reference:target", SpecConfig(), profile="off", dtype="float32")
    engine, _ = build_engine(config, max_waiting=4, draft_required=False)
    with engine, engine.llm:
        here = threading.current_thread().name
        assert built == [here]
        server = Server(LocalBackend(engine, "reference"))
        body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "[ab]+"}}
        assert server.post("/v1/completions", body).status_code == 200
        assert built == [here]
        assert len(compiled) == 1
        assert compiled[0].startswith("foretoken-prepare")


def deep(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def of_schema(schema: str) -> str:
    body = json.dumps({"messages": MESSAGES, "max_completion_tokens": 4, "response_format": "?"})
    form = '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}"
    return body.replace('"?"', form)


BOMBS = {
    "recursive": of_schema('{"$ref":"#"}'),
    "mutually recursive": of_schema('{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
    "deep": of_schema(deep(10_000)),
    "fairly deep": of_schema(deep(200)),
    "nested repetition": {"messages": MESSAGES, "structured_outputs": {"regex": "(a+)+b"}, "max_completion_tokens": 4},
    "long repetition": {
        "messages": MESSAGES,
        "structured_outputs": {"regex": "x{1,100000}"},
        "max_completion_tokens": 4,
    },
    "many values": of_schema(json.dumps({"enum": [f"value {i}" for i in range(100_000)]})),
    "pattern in a tool": {
        "messages": MESSAGES,
        "max_completion_tokens": 4,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": {"pattern": "(a+)+b"}}}}],
    },
    "no grammar": {"messages": MESSAGES, "structured_outputs": {"grammar": "start: (("}, "max_completion_tokens": 4},
}


def test_schema_bombs(server: Server) -> None:
    """Case 13: hostile schemas are refused or followed, and the event loop answers others meanwhile."""

    async def run() -> dict[str, httpx2.Response]:
        replies, num_others = {}, 0
        for name, body in BOMBS.items():
            task = asyncio.create_task(server.posted("/v1/chat/completions", body))
            transport = httpx2.ASGITransport(server.app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                while not task.done():
                    assert (await client.get("/version")).status_code == 200
                    num_others += not task.done()
                    await asyncio.sleep(0)
            replies[name] = task.result()
        assert num_others > len(BOMBS)
        return replies

    for name, reply in asyncio.run(run()).items():
        assert reply.status_code in (200, 400), (name, reply.text)
        assert len(reply.content) < 8192, name
    assert not server.backend.engine.llm.engine.has_work


def test_a_bomb_is_refused_by_its_field(server: Server) -> None:
    for name, param in (
        ("deep", None),
        ("many values", "response_format.json_schema"),
        ("recursive", "response_format"),
        ("pattern in a tool", "tools"),
        ("no grammar", "structured_outputs"),
    ):
        reply = server.post("/v1/chat/completions", BOMBS[name])
        assert reply.status_code == 400, name
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["param"] == param
    body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}}
    assert server.post("/v1/responses", body).json()["error"]["param"] == "text.format"
    reply = server.post("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "start: (("}})
    assert reply.json()["error"]["param"] == "structured_outputs"


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside which random heads for the reference target are made."""
    folder = tmp_path_factory.mktemp("heads")
    (folder / "target").symlink_to(model_folder("reference:target"))
    return folder / "draft"


ENDING = [*(name for name in registry.DRAFTERS if name != registry.MTP), "tree"]


@pytest.mark.parametrize("drafter", some_of(ENDING, {"predicted", "eagle", "auto", "tree"}))
def test_grammar_termination_inside_run(engine: AsyncEngine, heads: Path, drafter: str) -> None:
    """Case 56: every drafter; drafts that go past the end of the form, a prediction above all, leave no trace."""
    draft = heads if drafter in registry.HEADS else "reference:draft"
    spec = spec_of("draft_model/static" if drafter == "tree" else drafter, draft, num_draft=4)
    server = Server(LocalBackend(engine, "reference"), ApiConfig(specs=(spec,)))
    form = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SWITCH}}
    plain = server.chat(response_format=form, spec={"drafter": None})["choices"][0]
    text = plain["message"]["content"]
    assert set(json.loads(text)) == {"on", "level"}
    assert plain["finish_reason"] == "stop"
    content = f"{text} and {text} again"
    more: dict[str, Any] = {"spec": {"drafter": spec.drafter}}
    if drafter == "predicted":
        more = {"prediction": {"type": "content", "content": content}}
    for prompt in ([], [{"role": "assistant", "content": content}, *MESSAGES]):
        asked = {"response_format": form, "messages": [*MESSAGES, *prompt]}
        expected = server.chat(**asked, spec={"drafter": None})["choices"] if prompt else [plain]
        found = server.chat(**asked, **more)
        assert found["choices"] == expected
        assert found["choices"][0]["finish_reason"] == "stop"
        if drafter == "predicted" and not prompt:
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 0
            assert details["rejected_prediction_tokens"] > 0


def test_every_form_of_structured_outputs(server: Server) -> None:
    for form, allowed in (
        ({"choice": ["red", "green"]}, {"red", "green"}),
        ({"regex": "[ab]"}, {"a", "b"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"json": {"type": "boolean"}}, {"true", "false"}),
        ({"json": '{"type": "boolean"}'}, {"true", "false"}),
    ):
        found = server.chat(structured_outputs=form, n=2, temperature=1.0, seed=4)
        assert {choice["message"]["content"] for choice in found["choices"]} <= allowed
    assert server.chat(response_format={"type": "json_object"})["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("vocab_size", some_of([1, 2, 31, 8193, 151936], {1, 31, 151936}))
def test_odd_vocab(tmp_path: Path, vocab_size: int) -> None:
    """Case 46, over HTTP: ids are in range whatever the size of the vocabulary, drafted or not."""
    shape = {"hidden_size": 16, "vocab_size": vocab_size}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    folder = tiny_checkpoint(tmp_path / "odd", "llama", num_hidden_layers=2, **shape, **ends)
    draft = SpecConfig(
        "draft_model",
        str(tiny_checkpoint(tmp_path / "draft", "llama", seed=1, num_hidden_layers=1, **shape, **ends)),
        3,
    )
    with LLM(str(folder), dtype="float32", profile="off") as llm, AsyncEngine(llm) as engine:
        server = Server(LocalBackend(engine, "odd"), ApiConfig(specs=(draft,)))
        last = vocab_size - 1
        for drafter in (None, "ngram", "suffix", "recycling", "lookahead", "draft_model"):
            body = {"prompt": [last, 0, last, 0], "max_tokens": 12, "temperature": 1.0, "seed": 2, "top_k": 5}
            more = {"ignore_eos": True, "return_token_ids": True, "logprobs": 1, "spec": {"drafter": drafter}}
            reply = server.post("/v1/completions", body | more)
            assert reply.status_code == 200, reply.text
            ids = reply.json()["choices"][0]["token_ids"]
            assert len(ids) == 12
            assert all(0 <= token < vocab_size for token in ids)
        refused = server.post("/v1/completions", {"prompt": [vocab_size]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"


# ---- tools


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
    without._info = msgspec.structs.replace(without.info, tool_style=None)
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
    monkeypatch.setitem(tokenizer.__dict__, "chat_template", loops)
    try:
        reply = server.post("/v1/chat/completions", {"messages": MESSAGES})
    finally:
        worker.close()
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "messages"


# ---- responses


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
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "word " * 5000}, "input"),
    ):
        reply = server.post("/v1/responses", {"input": "x", **fields})
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == param, reply.text


# ---- tokens


def test_tokens_both_ways(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "def f(x):", "add_special_tokens": False}).json()
    assert found["count"] == len(found["tokens"]) > 2
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "def f(x):"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert "# user:" in server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        reply = server.post(path, body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_suffix_fills_in_the_middle(server: Server, engine: AsyncEngine) -> None:
    refused = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_feature")
    backend = LocalBackend(engine, "reference")
    backend._info = msgspec.structs.replace(backend.info, fim_tokens=((5, 6), 7, 8))
    body = {"prompt": ["def f(", [9, 10]], "suffix": "return", "max_tokens": 2, "return_token_ids": True}
    reply = Server(backend).post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    prefix, behind = (asyncio.run(backend.tokenize(text)) for text in ("def f(", "return"))
    ids = [choice["prompt_token_ids"] for choice in reply.json()["choices"]]
    assert ids == [[5, 6, *prefix, 7, *behind, 8], [5, 6, 9, 10, 7, *behind, 8]]
