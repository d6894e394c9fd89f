"""What a request is answered with that says nothing of sampling, or offers tools that nothing here runs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from foretoken.backend.call import Begun
from foretoken.errors import InputError
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from tests.helpers.fake_backend import INFO, FakeBackend, ended
from tests.helpers.http import JSON, client_of, run

ADVISED = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
HELLO: list[dict[str, str]] = [{"role": "user", "content": "hello"}]


def post(backend: FakeBackend, path: str, body: object, config: ApiConfig | None = None) -> tuple[int, Any]:
    async def send() -> tuple[int, Any]:
        async with client_of(create_app(backend, config)) as client:
            reply = await client.post(path, content=json.dumps(body), headers=JSON)
            return reply.status_code, reply.json()

    return run(send())


@pytest.mark.parametrize(
    ("fields", "config", "expected"),
    [
        ({}, None, (0.25, 0.5, 7)),
        ({"seed": 3, "presence_penalty": 1.0}, None, (0.25, 0.5, 7)),
        ({"temperature": 0.5}, None, (0.5, 1.0, 0)),
        ({"top_p": 0.9}, None, (1.0, 0.9, 0)),
        ({"top_k": -1}, None, (1.0, 1.0, 0)),
        ({}, ApiConfig(sampling_defaults="openai"), (1.0, 1.0, 0)),
        ({}, ApiConfig(default_temperature=0.125), (0.125, 0.5, 7)),
        ({"top_p": 0.9}, ApiConfig(default_temperature=0.0), (0.0, 0.9, 0)),
        ({"temperature": 0.5}, ApiConfig(default_temperature=0.125), (0.5, 1.0, 0)),
    ],
)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_advised_sampling_is_for_requests_that_name_none(
    path: str, asked: dict[str, Any], fields: dict[str, Any], config: ApiConfig | None, expected: tuple[float, ...]
) -> None:
    backend = FakeBackend()
    backend.info = msgspec.structs.replace(INFO, advised_sampling=ADVISED)
    status, answer = post(backend, path, {**asked, **fields}, config)
    assert status == 200, answer
    (call,) = backend.calls
    assert (call.params.temperature, call.params.top_p, call.params.top_k) == expected


@pytest.mark.parametrize("limit", ["max_request_tokens", "max_pending_tokens"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "n": 4}),
        ("/completion", {"prompt": ["a"] * 4}),
        ("/api/generate", {"prompt": "a", "raw": True, "stream": False}),
    ],
)
def test_a_length_that_nobody_named_is_cut_to_the_budget(path: str, body: dict[str, Any], limit: str) -> None:
    """Of all answers together; also where the budget is less than the context."""
    num_answers = 1 if "raw" in body else 4
    backend = FakeBackend((Begun(((1,),) * 4), *(ended(index, "") for index in range(num_answers))))
    limited: dict[str, Any] = {limit: 1000}
    config = ApiConfig(llama_cpp=True, ollama=True, **limited)
    status, answer = post(backend, path, body, config)
    assert status == 200, answer
    assert backend.calls[0].params.max_tokens == 1000 // num_answers


@pytest.mark.parametrize(("n", "max_tokens", "param"), [(4, 251, "max_tokens"), (128, None, "n")])
def test_what_the_budget_cannot_hold_is_refused_by_the_name_that_was_sent(
    n: int, max_tokens: int | None, param: str
) -> None:
    backend = FakeBackend(info=msgspec.structs.replace(INFO, max_waiting=1000))
    config = ApiConfig(max_request_tokens=1000 if max_tokens else 100)
    body = {"messages": HELLO, "n": n, "max_tokens": max_tokens}
    status, answer = post(backend, "/v1/chat/completions", body, config)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "too_many_tokens")
    assert not backend.calls


@pytest.mark.parametrize(("fields", "seed"), [({}, 9), ({"seed": 3}, 3)])
def test_the_seed_of_requests_that_name_none(fields: dict[str, int], seed: int) -> None:
    backend = FakeBackend()
    config = ApiConfig(default_seed=9)
    assert post(backend, "/v1/chat/completions", {"messages": HELLO, **fields}, config)[0] == 200
    assert backend.calls[0].params.seed == seed


@pytest.mark.parametrize("wrong", [{"default_seed": -1}, {"default_temperature": 101.0}, {"default_seed": 2**64}])
def test_defaults_that_no_request_could_name_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        ApiConfig(**wrong)


def test_hosted_tools_are_left_out_and_said_so() -> None:
    tools = [{"type": "web_search", "external_web_access": False}, {"type": "namespace", "name": "a", "tools": []}]
    backend = FakeBackend()
    status, answer = post(backend, "/v1/responses", {"input": "hello", "tools": tools})
    assert status == 200, answer
    assert answer["tools"] == []
    assert answer["foretoken"]["tools_left_out"] == ["namespace", "web_search"]
    assert not backend.calls[0].tools


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "nonsense"}], "tools.0.type"),
        ([{"type": "web_search"}, {"type": "function"}], "tools.1.name"),
        ([{}], "tools.0.name"),
        ([3], "tools.0"),
    ],
    ids=str,
)
def test_tools_that_do_not_exist_are_named(tools: list[Any], param: str) -> None:
    status, answer = post(FakeBackend(), "/v1/responses", {"input": "hello", "tools": tools})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_a_hosted_tool_cannot_be_forced() -> None:
    asked = {"input": "hello", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    status, answer = post(FakeBackend(), "/v1/responses", asked)
    assert (status, answer["error"]["param"]) == (400, "tool_choice"), answer
