"""Structured answers and tokens over HTTP: the reference target, its template takes tools."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from foretoken import LLM, EngineConfig, SamplingParams, SpecConfig, registry
from foretoken.backend.call import TextToEncode
from foretoken.backend.local import LocalBackend, build_engine
from foretoken.engine.async_engine import AsyncEngine
from foretoken.model.names import model_folder
from foretoken.server.api.config import ApiConfig
from foretoken.text import structure
from tests.helpers.checkpoints import tiny_checkpoint
from tests.helpers.specs import spec_of
from tests.helpers.usual import some_of
from tests.server.structured import MESSAGES, SWITCH, Server, engine, server

__all__ = ["engine", "server"]  # fixtures


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


# ---- tokens


def test_tokens_both_ways(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "def f(x):", "add_special_tokens": False}).json()
    assert found["count"] == len(found["tokens"]) > 2
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "def f(x):"}
    spelt = server.post("/tokenize", {"prompt": "def f(x):", "add_special_tokens": False, "return_token_strs": True})
    assert "".join(spelt.json()["token_strs"]).replace("\u0120", " ") == "def f(x):"
    assert (spelt.json()["tokens"], found["token_strs"]) == (found["tokens"], None)
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
    backend.info = msgspec.structs.replace(backend.info, fim_tokens=((5, 6), 7, 8))
    body = {"prompt": ["def f(", [9, 10]], "suffix": "return", "max_tokens": 2, "return_token_ids": True}
    reply = Server(backend).post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    prefix, behind = (asyncio.run(backend.tokenize(TextToEncode(text))) for text in ("def f(", "return"))
    ids = [choice["prompt_token_ids"] for choice in reply.json()["choices"]]
    assert ids == [[5, 6, *prefix, 7, *behind, 8], [5, 6, 9, 10, 7, *behind, 8]]
