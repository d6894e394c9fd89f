"""Requests that are refused: each with the envelope, the field's name, and before the engine sees anything."""

from __future__ import annotations

import json
import logging
import re
import resource
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from foretoken.backend.call import AnswerEnded, Begun, TokenEvent
from foretoken.config import SamplingParams
from foretoken.errors import InputError
from foretoken.server.api.app import create_app
from foretoken.server.api.body import MAX_CONTAINERS, MAX_VALUES, RequestPart, read_json
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.errors import CODES
from foretoken.server.api.schemas import SamplingFields
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.http import JSON, Records, client_of, run

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


class Trial:
    """One application over a scripted backend, and what it answers to one body after another."""

    def __init__(self, config: ApiConfig | None = None, backend: FakeBackend | None = None) -> None:
        self.backend, self.records = backend or FakeBackend(), Records()
        self.app = create_app(self.backend, config, [self.records])

    def post(self, path: str, *bodies: Any, headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
        """Status and JSON for each body; bytes are sent as they are."""

        async def send() -> list[tuple[int, Any]]:
            found = []
            async with client_of(self.app) as client:
                for body in bodies:
                    data = body if isinstance(body, bytes) else json.dumps(body).encode()
                    response = await client.post(path, content=data, headers=JSON if headers is None else headers)
                    assert response.headers["x-request-id"]
                    found.append((response.status_code, response.json()))
            return found

        return run(send())

    def refused(self, path: str, *bodies: Any, status: int = 400, param: str | None = "") -> list[dict[str, Any]]:
        """The errors of bodies that must all be refused; the engine has seen none, and each has a record."""
        before = len(self.records.all), len(self.backend.calls)
        errors = []
        for body, (code, answer) in zip(bodies, self.post(path, *bodies), strict=True):
            assert code == status, (str(body)[:200], answer)
            error = answer["error"]
            assert error["code"] in CODES
            assert error["type"] == "invalid_request_error" or status in (404, 429)
            assert param == "" or error["param"] == param, (str(body)[:200], error)
            errors.append(error)
        assert len(self.backend.calls) == before[1]
        new = self.records.all[before[0] :]
        assert [(record.status, record.reason) for record in new] == [(status, one["code"]) for one in errors]
        return errors


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial()


def texts(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", **fields}


def test_bad_json(trial: Trial) -> None:
    """Case 1."""
    bodies = [
        b'{"prompt": "a"',
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "prompt": "b"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a", "metadata": {"x": 1, "x": 2}}',
        b"[" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"{'prompt': 'a'}",
        b"",
    ]
    codes = [error["code"] for error in trial.refused(TEXT, *bodies)]
    assert codes[:5] == ["invalid_json", "invalid_json", "duplicate_key", "invalid_json", "duplicate_key"]
    assert set(codes[5:]) <= {"invalid_json", "missing_field"}


def test_more_values_than_a_request_needs_are_not_parsed(trial: Trial) -> None:
    """A body of 30 MB with ten million empty lists held up all clients for half a minute, and took 900 MB."""
    for many, name in (
        (b"[]," * (MAX_CONTAINERS + 1), "objects and lists"),
        (b"{}," * (MAX_CONTAINERS + 1), "objects and lists"),
        (b"1," * MAX_VALUES, "values"),
        (b'"",' * (MAX_VALUES + 1), "texts"),
        (b'"\\\\",' * (MAX_VALUES + 1), "texts"),
    ):
        body = b'{"prompt": "a", "x": [' + many + b"1]}"
        (error,) = trial.refused(TEXT, body, status=413)
        assert error["code"] == "body_too_large"
        assert name in error["message"]


def test_texts_and_token_ids_of_any_length_are_parsed() -> None:
    quoted = '[,{"\\' * MAX_CONTAINERS
    assert read_json(json.dumps({"a": quoted}).encode()) == {"a": quoted}
    assert len(read_json(b"[" + b"7," * (MAX_VALUES - 1) + b"7]")) == MAX_VALUES
    assert len(read_json(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]")) == MAX_CONTAINERS - 1


def test_a_list_of_wrong_items_is_one_error(trial: Trial) -> None:
    """Each was an error of a kilobyte: a body of 30 MB took the front 12 GB and minutes."""
    for path, fields in (
        (TEXT, {"stop_token_ids": [-1] * 1000}),
        (TEXT, {"bad_words": [1] * 1000}),
        (TEXT, {"structured_outputs": {"choice": [""] * 1000}}),
        (CHAT, {"messages": [1] * 1000}),
        (CHAT, {"messages": HELLO, "tools": [1] * 100}),
        (RESPONSES, {"input": "a", "include": [1] * 1000}),
        ("/v1/messages", {"messages": [1] * 1000, "max_tokens": 1}),
    ):
        ((status, answer),) = trial.post(path, {"prompt": "a"} | fields if path == TEXT else fields)
        assert status == 400
        assert "more problems" not in answer["error"]["message"], (path, fields)
    unknown = {f"k{place}": 1 for place in range(1000)}
    for name in ("spec", "foretoken", "structured_outputs"):
        (error,) = trial.refused(TEXT, texts(**{name: unknown}))
        assert error["code"] == "unknown_field"
        assert re.search(r"[(]\d more problems[)]", error["message"])


def test_every_list_of_a_model_ends_at_its_first_wrong_item() -> None:
    models, waiting, wrong = set[Any](), [RequestPart, SamplingFields, BaseModel], set[str]()
    while waiting:
        kind = waiting.pop()
        waiting += [one for one in kind.__subclasses__() if one not in models]
        if kind.__module__.startswith("foretoken.server.api."):
            models.add(kind)
    for model in models:
        parts: list[Any] = [model.__pydantic_core_schema__]
        while parts:
            part = parts.pop()
            if isinstance(part, dict):
                is_open = part.get("type") == "list" and part.get("items_schema", {"type": "any"})["type"] != "any"
                if is_open and not part.get("fail_fast"):
                    wrong.add(f"{model.__name__}: {part['items_schema']['type']}")
                parts += part.values()
            elif isinstance(part, list | tuple):
                parts += part
    assert len(models) > 20
    assert not wrong, "write ListOf instead of list"


def test_non_object_body(trial: Trial) -> None:
    """Case 2."""
    for path in (TEXT, CHAT):
        trial.refused(path, [], None, "x", 1, True, param=None)


def test_wrong_content_type(trial: Trial) -> None:
    """Case 3."""
    for headers in ({"content-type": "text/plain"}, {}, {**JSON, "content-encoding": "gzip"}):
        ((status, answer),) = trial.post(TEXT, texts(), headers=headers)
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert trial.post(TEXT, texts(), headers={"content-type": "application/json; charset=utf-8"})[0][0] == 200


def test_messages_shapes(trial: Trial) -> None:
    """Case 4."""
    ok = HELLO[0]
    shapes: list[Any] = [
        None,
        "string",
        [],
        [123],
        [{}],
        [{"role": 123, "content": "a"}],
        [{"role": "user", "content": 123}],
        [ok, {}],
        [{"role": "user"}],
        [{"role": "tool", "content": "4"}],
        [{"role": "", "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [ok, {"role": "wizard", "content": "a"}],
        [{"role": "User", "content": "a"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "assistant", "tool_calls": 3}],
    ]
    errors = trial.refused(CHAT, *({"messages": shape} for shape in shapes))
    assert all(error["param"].startswith("messages") for error in errors)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    assert trial.refused(CHAT, {"messages": image})[0]["code"] == "unsupported_feature"
    turns = [ok, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert [status for status, _ in trial.post(CHAT, {"messages": turns}, {"messages": parts})] == [200, 200]
    assert trial.backend.calls[-1].messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(("text", "found"), [("{a: 1}", {"INVALID_JSON": "{a: 1}"}), ("null", {})])
def test_calls_are_taken_back_as_the_model_wrote_them(trial: Trial, text: str, found: Any) -> None:
    """A conversation must not end with arguments that are no JSON object; what is no text is named where it stands."""
    function = {"name": "f", "arguments": text}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": text}
    chat, response = {"messages": [*HELLO, call]}, {"input": [*HELLO, item]}
    for path, body in ((CHAT, chat), (RESPONSES, response)):
        assert trial.post(path, body)[0][0] == 200
        messages = trial.backend.calls[-1].messages
        assert messages is not None
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == found
    function["arguments"] = 5  # type: ignore[assignment]
    trial.refused(CHAT, chat, param="messages.1.tool_calls")
    trial.refused(RESPONSES, {"input": [*HELLO, item | {"arguments": 5}]}, param="input.1.arguments")


def test_c2_a_role_that_nobody_knows_is_refused_by_name(trial: Trial) -> None:
    """Also where the template would write it; roles of the template's own are taken."""
    wizard = {"role": "wizard", "content": "a"}
    (error,) = trial.refused(CHAT, {"messages": [*HELLO, wizard]}, param="messages.1.role")
    assert error["message"] == ("messages.1.role: must be one of system, developer, user, assistant, tool, function")
    trial.refused(RESPONSES, {"input": [*HELLO, wizard], "instructions": "b"}, param="input.1.role")
    trial.refused(RESPONSES, {"input": [{"type": "message", "content": "a"}]}, param="input.0.role")
    assert trial.post("/tokenize", {"messages": [wizard]})[0][0] == 400
    own = Trial(backend=FakeBackend(info=msgspec.structs.replace(INFO, template_roles=("user", "wizard"))))
    assert own.post(CHAT, {"messages": [*HELLO, wizard]})[0][0] == 200
    assert own.post(RESPONSES, {"input": [*HELLO, wizard]})[0][0] == 200
    assert own.post("/tokenize", {"messages": [wizard]})[0][0] == 200
    assert own.refused(CHAT, {"messages": [{"role": "x", "content": "a"}]})[0]["message"].endswith("function, wizard")
    for role in ("system", "developer", "user", "assistant", "function"):
        assert trial.post(CHAT, {"messages": [{"role": role, "content": "a"}]})[0][0] == 200


def test_fields_of_several_shapes_are_named_as_the_request_has_them(trial: Trial) -> None:
    for value in ([], 5, None, ["a"], [{}, 1]):
        (error,) = trial.refused(RESPONSES, {"input": value}, param="input")
        assert error["message"].startswith("input: must be a text, or a list of items"), error
    for value in (5, ["a", 5], {"a": 1}):
        (error,) = trial.refused(TEXT, texts(stop=value), param="stop")
        assert error["message"].startswith("stop: must be a text or a list of texts"), error


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "auto", "parallel_tool_calls": False},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"functions": [], "function_call": "auto"},
        {"function_call": "none"},
    ],
)
def test_c1_tools_that_may_not_be_called_are_left_out(fields: dict[str, Any]) -> None:
    """The scripted model's template takes no tools."""
    trial = Trial()
    ((status, answer),) = trial.post(CHAT, {"messages": HELLO, **fields})
    assert status == 200, answer
    assert trial.backend.calls[-1].tools is None
    if "functions" not in fields and "function_call" not in fields:
        flat = [{"type": "function", "name": "f"}] if fields.get("tools") else fields.get("tools")
        ((status, answer),) = trial.post(RESPONSES, {"input": "a", **fields, "tools": flat})
        assert status == 200, answer
        assert trial.backend.calls[-1].tools is None


def test_c1_tools_that_might_be_called_are_refused(trial: Trial) -> None:
    for choice in ("auto", "required", None):
        trial.refused(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}, param="tools")
    trial.refused(CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, param="functions")
    trial.refused(CHAT, {"messages": HELLO, "web_search_options": {}}, param="web_search_options")
    trial.refused(CHAT, {"messages": HELLO, "audio": {}}, param="audio")
    trial.refused(CHAT, {"messages": HELLO, "function_call": {"name": "f"}}, param="function_call")
    two = {"messages": HELLO, "tools": TOOLS * 2, "tool_choice": "none"}
    trial.refused(CHAT, two, param="tools")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (TEXT, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (RESPONSES, "max_tokens"),
    ],
)
def test_c3_a_limit_beyond_the_context_is_cut_to_it(path: str, name: str) -> None:
    bodies = {TEXT: {"prompt": "a"}, CHAT: {"messages": HELLO}, RESPONSES: {"input": "a"}}
    for most in (INFO.max_model_len + 1, 2**31, 99_999_999_999, 2**63 - 1):
        trial = Trial()
        ((status, answer),) = trial.post(path, {**bodies[path], name: most})
        assert status == 200, answer
        assert trial.backend.calls[-1].params.max_tokens == INFO.max_model_len


SAME_BOUNDS: dict[str, tuple[float, ...]] = {
    "max_tokens": (0, 1, 2**31, 99_999_999_999, 2**63 - 1),
    "top_k": (0, 1, 2**31, 99_999_999_999, 2**63 - 1),
    "min_tokens": (-1, 0, 1, 17, 2**63),
    "temperature": (-0.1, 0, 99.9, 100, 100.1),
    "top_p": (0, 1e-9, 1, 1.1),
    "min_p": (-0.1, 0, 1, 1.1),
    "presence_penalty": (-2.1, -2, 2, 2.1),
    "frequency_penalty": (-2.1, -2, 2, 2.1),
    "repetition_penalty": (0, 1e-3, 100, 101),
    "seed": (0, 2**64 - 1, 2**64),
    "priority": (-101, -100, 100, 101),
    "n": (0, 1),
}


@pytest.mark.parametrize("name", SAME_BOUNDS)
def test_c3_bounds_are_those_of_the_command_line(trial: Trial, name: str) -> None:
    """What `SamplingParams` takes, which the command line fills, requests may say too."""
    for value in SAME_BOUNDS[name]:
        try:
            SamplingParams(**{"max_tokens": 16, name: value})
            expected = 200
        except InputError:
            expected = 400
        assert trial.post(TEXT, texts(**{name: value}))[0][0] == expected, (name, value)


@pytest.mark.parametrize(("asked", "used"), [(-(2**63), 2**63), (-2, 2**64 - 2), (-1, None), (0, 0)])
def test_a_seed_may_be_negative_as_openais(asked: int, used: int | None) -> None:
    """-1 asks for a fresh one, as in vLLM and llama.cpp, of which a server's default seed is none."""
    trial = Trial(ApiConfig(default_seed=7))
    assert trial.post(TEXT, texts(seed=asked))[0][0] == 200
    assert trial.backend.calls[-1].params.seed == used


def test_a_conversation_is_continued_or_answered(trial: Trial) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    for fields, options in (
        ({}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"continue_final_message": False}, {}),
    ):
        assert trial.post(CHAT, {"messages": begun, **fields})[0][0] == 200
        assert trial.backend.calls[-1].template_options == options
    both = {"messages": begun, "continue_final_message": True, "add_generation_prompt": True}
    trial.refused(CHAT, both, param="continue_final_message")


def test_empty_prompt(trial: Trial) -> None:
    """Case 5."""
    trial.refused(TEXT, *({"prompt": value} for value in ("", [], [[]], ["a", ""], [[1], []])), param="prompt")


def test_token_ids_out_of_range(trial: Trial) -> None:
    """Case 6."""
    wrong = [-1, INFO.vocab_size, 2**31, 2**70, True, 1.5, None]
    trial.refused(TEXT, *({"prompt": [1, value]} for value in wrong), param="prompt")
    trial.refused(TEXT, *({"prompt": [[1], [value]]} for value in wrong), param="prompt")


FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def test_numbers_nonfinite(trial: Trial) -> None:
    """Case 7."""
    for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"):
        trial.refused(TEXT, *(b'{"prompt": "a", "%s": %s}' % (name.encode(), number) for name in FLOATS))
        trial.refused(TEXT, b'{"prompt": "a", "logit_bias": {"3": %s}}' % number)
        trial.refused(TEXT, b'{"prompt": "a", "max_tokens": %s}' % number)
    for name in FLOATS:
        trial.refused(TEXT, *(texts(**{name: value}) for value in ("NaN", "1", [1], {}, True)), param=name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1, 100.1)),
        ("top_p", (0, 1.1)),
        ("min_p", (-0.1, 1.1)),
        ("presence_penalty", (-2.1, 2.1)),
        ("frequency_penalty", (-2.1, 2.1)),
        ("repetition_penalty", (0, -1, 101)),
        ("seed", (2**64, -(2**63) - 1)),
        ("max_tokens", (0, -1, 2**63)),
        ("min_tokens", (-1, 17, 2**63)),
        ("top_k", (-2, 2**63)),
        ("n", (0, -1)),
        ("priority", (-101, 101)),
        ("spec.num_draft", (-1, 1025)),
    ],
)
def test_numbers_range(trial: Trial, name: str, values: tuple[float, ...]) -> None:
    """Case 8."""
    outer, _, inner = name.partition(".")
    bodies = [texts(**{outer: {inner: value} if inner else value}) for value in values]
    for value, error in zip(values, trial.refused(TEXT, *bodies), strict=True):
        assert error["param"].startswith(name)
        assert re.search(r"\(got -?[\d.e+]+\)", error["message"]), error
        assert str(value)[:5] in error["message"] or value == 2**64 or value == 2**63


def test_huge_n(trial: Trial) -> None:
    """Case 9."""
    bodies = [texts(n=10**6), texts(best_of=10**6), texts(n=10**18), {"prompt": ["a"] * 60, "n": 100}]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trial.refused(TEXT, *bodies)
    small = Trial(ApiConfig(max_request_tokens=1000))
    assert small.refused(TEXT, texts(n=10, max_tokens=101), param="max_tokens")[0]["code"] == "too_many_tokens"
    assert small.post(TEXT, texts(n=1, max_tokens=1000))[0][0] == 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown < 5 << 10  # KiB


def test_huge_logprobs(trial: Trial) -> None:
    """Case 10."""
    trial.refused(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 10**6}, param="top_logprobs")
    trial.refused(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, param="top_logprobs")
    trial.refused(CHAT, {"messages": HELLO, "top_logprobs": 2}, param="top_logprobs")
    trial.refused(TEXT, texts(logprobs=10**6), texts(logprobs=21), param="logprobs")
    token = TokenEvent(1, "a", b"a", "prompt", logprob=-1.0)
    script = (Begun(((1,) * 8000,)), piece(0, "a"), AnswerEnded(0, "stop", "a", 1, ended(0, "").stats, (token,) * 8000))
    capped = Trial(backend=FakeBackend(script))
    ((status, answer),) = capped.post(TEXT, texts(echo=True, logprobs=20, max_tokens=1))
    assert (answer["error"]["code"], answer["error"]["param"], status) == ("too_many_tokens", "logprobs", 400)
    assert capped.backend.generations[0].num_cancelled
    assert capped.post(TEXT, texts(echo=True, logprobs=5, max_tokens=1))[0][0] == 200


def test_logit_bias_bad(trial: Trial) -> None:
    """Case 11."""
    many = {str(token): 1 for token in range(4096)}
    values: list[Any] = [{"a": 1}, {"-1": 1}, {"1.5": 1}, {"²": 1}, {"": 1}, {str(INFO.vocab_size): 1}, {"1": 101}]
    values += [{"1": -101}, {"1": "x"}, {"1": True}, {"1": None}, many, [1], "x"]
    values.append({str(token): 1 for token in range(10**5)})
    trial.refused(TEXT, *(texts(logit_bias=value) for value in values), param="logit_bias")
    assert trial.post(TEXT, texts(logit_bias={"5": -100}))[0][0] == 200
    assert trial.backend.calls[-1].params.logit_bias == {5: -100}


def test_stop_limits(trial: Trial) -> None:
    """Case 12."""
    values: list[Any] = [list("abcde"), "", [""], ["a", ""], "x" * 10**6, 3, [3], [["a"]], {"a": 1}]
    errors = trial.refused(TEXT, *(texts(stop=value) for value in values))
    assert all(error["param"].startswith("stop") for error in errors)
    assert trial.post(TEXT, texts(stop=None), texts(stop="a"), texts(stop=list("abcd")))[-1][0] == 200


def test_unknown_fields(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    """Case 14."""
    known = {"store": True, "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "service_tier": "flex"}
    known |= {"prompt_cache_key": "k", "stream_options": {"continuous_usage_stats": True}, "stop": None}
    with caplog.at_level(logging.WARNING, "foretoken.server"):
        assert trial.post(TEXT, texts(**known))[0][0] == 200
        assert not caplog.records
        assert [status for status, _ in trial.post(TEXT, *[texts(never_heard_of=1)] * 3)] == [200] * 3
        assert len([one for one in caplog.records if "never_heard_of" in one.getMessage()]) == 1
    strict = Trial(ApiConfig(strict=True))
    assert strict.refused(TEXT, texts(never_heard_of=1), param="never_heard_of")[0]["code"] == "unknown_field"
    assert strict.post(TEXT, texts(**known))[0][0] == 200


def test_unknown_keys_inside_our_own_objects_are_refused(trial: Trial) -> None:
    assert trial.refused(TEXT, texts(spec={"gamma": 3}), param="spec.gamma")[0]["code"] == "unknown_field"
    assert trial.refused(TEXT, texts(foretoken={"tracing": True}), param="foretoken.tracing")


def test_unknown_model(trial: Trial) -> None:
    """Case 15."""
    for path, body in ((TEXT, texts()), (CHAT, {"messages": HELLO})):
        (error,) = trial.refused(path, {**body, "model": "gpt-9"}, status=404, param="model")
        assert (error["code"], error["type"]) == ("model_not_found", "not_found_error")
        assert "gpt-9" not in error["message"]
        assert "see /v1/models" in error["message"]
        assert [status for status, _ in trial.post(path, body, {**body, "model": "fake"})] == [200, 200]
