"""Errors over HTTP name the fields of a request as it was sent, whatever chat or text it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.backend.call import AnswerFailed, Begun
from foretoken.server.api.config import ApiConfig
from tests.helpers.fake_backend import FakeBackend, piece
from tests.helpers.http import client_of, run
from tests.server.test_validation import CHAT, HELLO, RESPONSES, Trial

LONG = {"const": "x" * 600_000}
ASKED = {"model": "fake", "max_tokens": 9, "messages": HELLO}
FORM = {"type": "json_schema", "schema": LONG}
SENT: list[tuple[str, Any, str]] = [
    ("/completion", {"prompt": "a", "n_probs": 99}, "n_probs"),
    ("/completion", {"prompt": "a", "n_predict": 2000}, "n_predict"),
    ("/completion", {"prompt": "a", "max_tokens": 2000}, "max_tokens"),
    ("/completion", {"prompt": "a", "json_schema": LONG}, "json_schema"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ("/api/chat", {"messages": HELLO, "options": {"top_p": 0}}, "options.top_p"),
    ("/api/chat", {"messages": HELLO, "options": {"stop": [""]}}, "options.stop"),
    ("/api/chat", {"messages": HELLO, "stop": [""]}, "stop"),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 2000}}, "options.num_predict"),
    ("/api/chat", {"messages": HELLO, "format": LONG}, "format"),
    ("/api/generate", {"prompt": "a", "format": LONG}, "format"),
    ("/api/generate", {"prompt": "a", "raw": True, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ("/v1/messages", ASKED | {"max_tokens": 2000}, "max_tokens"),
    ("/v1/messages", ASKED | {"stop_sequences": [""]}, "stop_sequences"),
    ("/v1/messages", ASKED | {"stop": [""]}, "stop"),
    ("/v1/messages", ASKED | {"output_config": {"format": FORM}}, "output_config.format.schema"),
    ("/v1/messages", ASKED | {"output_format": FORM}, "output_format.schema"),
    (RESPONSES, {"input": "a", "max_output_tokens": 2000}, "max_output_tokens"),
    (RESPONSES, {"input": "a", "max_tokens": 2000}, "max_tokens"),
    (RESPONSES, {"input": "a", "text": {"format": FORM | {"name": "a"}}}, "text.format"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 2000}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "max_tokens": 2000}, "max_tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), SENT)
def test_errors_name_the_fields_as_they_were_sent(path: str, body: Any, param: str) -> None:
    """Before the engine is asked; the text begins with the name, which is all that clients of Ollama see."""
    trial = Trial(ApiConfig(ollama=True, llama_cpp=True, max_request_tokens=1000))
    ((status, answer),) = trial.post(path, body)
    error = answer if path.startswith("/api/") else answer["error"]
    assert (status, trial.backend.calls) == (400, [])
    assert (error["error"] if "error" in error else error["message"]).startswith(f"{param}: "), error
    assert error.get("param", error.get("details", {}).get("param", param)) == param


NAMED = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("choice", "path", "message"),
    [
        (NAMED, CHAT, "tool_choice.function: Field required"),
        ({"type": "function", "function": {"name": "f"}}, RESPONSES, "tool_choice.name: Field required"),
        ({"type": "tool", "name": "f"}, RESPONSES, "tool_choice.type: Input should be 'function'"),
        ({"type": "allowed_tools"}, CHAT, "tool_choice.allowed_tools: Field required"),
        ("any", CHAT, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ("any", RESPONSES, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        (5, CHAT, "tool_choice: Input should be 'none', 'auto' or 'required' (got 5)"),
    ],
)
def test_the_error_of_a_tool_choice_speaks_of_the_form_that_was_sent(choice: Any, path: str, message: str) -> None:
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}
    if path == RESPONSES:
        body = {"input": "a", "tools": [NAMED]}
    ((status, answer),) = Trial().post(path, {**body, "tool_choice": choice})
    assert status == 400
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["param"] == message.partition(":")[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", {"messages": HELLO, "format": "json"}, "format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ("/v1/messages", ASKED | {"output_format": FORM | {"schema": {}}}, "output_format"),
    ],
)
def test_answers_that_fail_name_the_fields_as_they_were_sent(path: str, body: Any, param: str, is_stream: bool) -> None:
    failed = AnswerFailed(0, "InputError", "no token is left", "json_schema")
    trial = Trial(ApiConfig(ollama=True), FakeBackend((Begun(((1,),)), piece(0, "a"), failed)))

    async def send() -> str:
        async with client_of(trial.app) as client:
            return (await client.post(path, json=body | {"stream": is_stream})).text

    assert f"{param}: no token is left" in run(send())
