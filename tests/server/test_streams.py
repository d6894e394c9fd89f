"""Streams over a real socket: what is sent, and what happens when the reader is slow or leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from foretoken.backend.call import AnswerFailed, Begun, Piece, TokenEvent
from foretoken.backend.local import LocalBackend
from foretoken.engine.async_engine import AsyncEngine
from foretoken.errors import NumericsError, WorkerDiedError
from foretoken.server.api.app import create_app
from foretoken.server.api.config import ApiConfig
from tests.helpers.fake_backend import INFO, FakeBackend, ended, piece
from tests.helpers.http import RawClient, Records, Serving, client_of, events_of, run, text_of
from tests.server.drafters import DRAFTERS, config_for
from tests.server.structured import events_of as named_events_of

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "def read(self, path):\n"
LONG = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Until something holds that other threads bring about."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def idle(engine: AsyncEngine) -> Callable[[], bool]:
    return lambda: not engine.llm.engine.has_work and not engine._requests


def stream(app: Any, path: str = TEXT, **body: Any) -> list[Any]:
    """The events of one stream."""

    async def read() -> str:
        async with client_of(app) as client:
            response = await client.post(path, json={"stream": True, **body})
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            return response.text

    return events_of(run(read()))


def answer_of(app: Any, path: str = TEXT, **body: Any) -> Any:
    """A response that is not streamed."""

    async def read() -> Any:
        async with client_of(app) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

    return run(read())


# ---- rules of section 6


def test_a_stream_has_the_shape_that_clients_know(backend: LocalBackend) -> None:
    app = create_app(backend)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    events = stream(app, CHAT, **body, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "length"
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert len({event["id"] for event in events}) == 1

    async def whole() -> Any:
        async with client_of(app) as client:
            return (await client.post(CHAT, json=body)).json()

    answer = run(whole())
    assert answer["choices"][0]["message"]["content"] == text_of(events)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_running_usage_stands_on_every_chunk_that_asks_for_it(backend: LocalBackend) -> None:
    events = stream(
        create_app(backend),
        prompt=PROMPT,
        max_tokens=4,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert 0 < counts[0] < 4
    alone = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in event for event in stream(create_app(backend), prompt=PROMPT, stream_options=alone))


def test_an_event_is_sent_for_each_verify_step_token_or_interval(backend: LocalBackend) -> None:
    body = {"prompt": PROMPT * 3, "max_tokens": 40, "temperature": 0, "spec": {"drafter": "ngram", "num_draft": 4}}

    def chunks(granularity: str) -> list[Any]:
        app = create_app(backend, ApiConfig(granularity=granularity))
        events = stream(app, **body, return_token_ids=True, foretoken={"trace": True})
        return [event for event in events if event["choices"][0].get("token_ids")]

    by_step, by_token, by_time = chunks("step"), chunks("token"), chunks("interval:200")
    sizes = [len(event["choices"][0]["token_ids"]) for event in by_step]
    assert max(sizes) > 1  # a burst of accepted tokens in one event
    assert all(len(event["foretoken"]["trace"]) == 1 for event in by_step)
    assert {len(event["choices"][0]["token_ids"]) for event in by_token} == {1}
    assert len(by_time) < len(by_step)
    ids = [
        [one for event in found for one in event["choices"][0]["token_ids"]] for found in (by_step, by_token, by_time)
    ]
    assert ids[0] == ids[1] == ids[2]
    assert text_of(by_step) == text_of(by_token) == text_of(by_time)
    assert sum(len(event["foretoken"]["trace"]) for event in by_time) == len(by_step)


def test_the_ids_of_prompts_and_answers_are_in_every_response_that_asks_for_them() -> None:
    """As in vLLM: a chat's prompt stands beside its choices, that of a text in the choice; in streams once."""
    script = (Begun(((1, 2),)), piece(0, "a"), piece(1, "b"), ended(0, "a"), ended(1, "b"))
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "a"}]}), (TEXT, {"prompt": "a"})):
        for is_asked in (True, False):
            app = create_app(FakeBackend(script), ApiConfig())
            asked = {**body, "n": 2, "return_token_ids": is_asked}
            whole, events = answer_of(app, path, **asked), stream(app, path, **asked)
            choices = [choice for event in events for choice in event["choices"]]
            assert all(("token_ids" in one) == is_asked for one in [*whole["choices"], *choices])
            places = [whole, *events] if path == CHAT else [*whole["choices"], *choices]
            found = [one["prompt_token_ids"] for one in places if "prompt_token_ids" in one]
            num_expected = (2 if path == CHAT else 4) * is_asked
            assert found == [[1, 2]] * num_expected
            for index in range(2 * is_asked):
                told = [token for one in choices if one["index"] == index for token in one["token_ids"]]
                assert told == whole["choices"][index]["token_ids"] != []
            if is_asked:
                assert "prompt_token_ids" in (events[0] if path == CHAT else events[0]["choices"][0])


def test_what_a_request_cost_is_said_once_though_both_answers_end_within_an_interval() -> None:
    script = (Begun(((1,),)), piece(0, "a"), piece(1, "b"), ended(0, "a"), ended(1, "b"))
    events = stream(create_app(FakeBackend(script), ApiConfig(granularity="interval:20")), prompt="a", n=2)
    assert [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]] == [0, 1]
    assert ["timings" in event for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (AnswerFailed(0, "NumericsError", "nan"), "numerical_error"),
        (AnswerFailed(0, "EngineError", "secret"), "engine_error"),
        (WorkerDiedError("gone"), "worker_died"),
        (NumericsError("nan"), "numerical_error"),
        (ended(0, "", "abort"), "draining"),
    ],
)
def test_errors_are_codes_before_the_first_byte_and_events_after_it(last: Any, code: str) -> None:
    records = Records()
    app = create_app(FakeBackend((Begun(((1,),)), last)), observers=[records])

    async def ask(is_stream: bool) -> httpx2.Response:
        async with client_of(app) as client:
            return await client.post(TEXT, json={"prompt": "a", "stream": is_stream})

    for is_stream in (False, True):
        response = run(ask(is_stream))
        assert response.status_code == (503 if code == "draining" else 500)
        assert response.json()["error"]["code"] == code
        assert response.headers.get("x-should-retry") == (None if code == "draining" else "false")
    app = create_app(FakeBackend((Begun(((1,),)), piece(0, "a"), last)), observers=[records])
    events = stream(app, prompt="a")
    assert events[-1]["error"]["code"] == code
    assert text_of(events[:-1]) == "a"
    assert [(record.status, record.reason) for record in records.all[-1:]] == [(200, code)]


@pytest.mark.parametrize(
    ("path", "asked"), [(TEXT, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})]
)
def test_an_error_names_the_field_of_the_request_streamed_or_not(path: str, asked: Any) -> None:
    script = (Begun(((1,),)), piece(0, "a"), AnswerFailed(0, "InputError", "no token is left", "json_schema"))
    app = create_app(FakeBackend(script))
    body = asked | {"response_format": {"type": "json_object"}}

    async def ask() -> httpx2.Response:
        async with client_of(app) as client:
            return await client.post(path, json=body)

    whole, last = run(ask()).json(), stream(app, path, **body)[-1]
    assert whole == last
    assert last["error"]["param"] == "response_format"


def test_sse_keepalive() -> None:
    """Case 41."""
    release = asyncio.Event()
    app = create_app(FakeBackend((Begun(((1,),)), release, piece(0, "a"), ended(0, "a"))), ApiConfig(ping_s=0.01))
    sent: list[bytes] = []

    async def read() -> None:
        async def receive() -> dict[str, Any]:
            if not asked:
                asked.append(1)
                return {"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent.count(b": ping\n\n") == 3:
                release.set()

        asked: list[int] = []
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": headers}
        await app(scope, receive, send)

    run(read())
    text = b"".join(sent).decode()
    assert text.count(": ping\n\n") >= 3
    assert text_of(events_of(text)) == "a"
    assert text.endswith("data: [DONE]\n\n")


# ---- every way of leaving


@pytest.mark.parametrize(
    ("drafter", "style"), [*((name, "close") for name in DRAFTERS), ("off", "half_close"), ("off", "reset")]
)
def test_disconnect_stream(backend: LocalBackend, serving: Serving, drafter: str, style: str) -> None:
    """Case 24."""
    records, engine = Records(), backend.engine
    address = serving(create_app(backend, config_for(drafter), [records]))
    client = RawClient(address, {**LONG, "stream": True, "spec": DRAFTERS[drafter]})
    client.read_until(b"data: ")
    leave(client, style)
    wait_until(idle(engine), "the request was not freed")
    wait_until(lambda: bool(records.all), "no record")
    (record,) = records.all
    assert (record.status, record.reason) == (499, "client")
    assert 0 < record.num_completion_tokens < 1500


def leave(client: RawClient, style: str) -> None:
    if style == "half_close":
        client.socket.shutdown(socket.SHUT_WR)
        wait_closed(client)
    elif style == "reset":
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()


def wait_closed(client: RawClient) -> None:
    """Read until the server closes."""
    while client.socket.recv(65536):
        pass


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_disconnect_nonstream(backend: LocalBackend, serving: Serving, drafter: str) -> None:
    """Case 25."""
    records, engine = Records(), backend.engine
    address = serving(create_app(backend, config_for(drafter), [records]))
    client = RawClient(address, {**LONG, "spec": DRAFTERS[drafter]})
    wait_until(lambda: engine.llm.engine.has_work, "it never ran")
    client.close()
    wait_until(idle(engine), "the request was not freed")
    wait_until(lambda: bool(records.all), "no record")
    assert (records.all[0].status, records.all[0].reason) == (499, "client")


def test_disconnect_between_two_intervals(backend: LocalBackend, serving: Serving) -> None:
    """Case 24: also while events are gathered, and traced."""
    records = Records()
    address = serving(create_app(backend, ApiConfig(granularity="interval:30"), [records]))
    client = RawClient(address, {**LONG, "stream": True, "n": 2, "foretoken": {"trace": True}})
    client.read_until(b"data: ")
    client.close()
    wait_until(lambda: bool(records.all), "no record")
    assert records.all[0].reason == "client"
    assert not backend._rounds._tickets
    assert backend._rounds not in backend.engine.llm.engine.watchers


@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnect_in_queue(backend: LocalBackend, serving: Serving, is_stream: bool) -> None:
    """Case 26: while eight others fill the batch."""
    engine, records = backend.engine, Records()
    address = serving(create_app(backend, observers=[records]))
    others = RawClient(address, {**LONG, "n": 8, "stream": True})
    others.read_until(b"data: ")
    client = RawClient(address, {**LONG, "stream": is_stream})
    wait_until(lambda: len(engine.llm.engine.scheduler.waiting) == 1, "it never waited")
    client.close()
    wait_until(lambda: not engine.llm.engine.scheduler.waiting, "it still waits")
    assert engine.llm.engine.has_work
    others.close()
    wait_until(idle(engine), "not all answers of n were freed")
    wait_until(lambda: len(records.all) == 2, "no records")
    assert {record.reason for record in records.all} == {"client"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnect_in_prefill(backend: LocalBackend, serving: Serving, is_stream: bool) -> None:
    """Case 26: a long prompt is read in chunks."""
    engine = backend.engine
    address = serving(create_app(backend))
    tokens = [100 + place % 3000 for place in range(1900)]
    client = RawClient(address, {"prompt": tokens, "max_tokens": 100, "stream": is_stream})
    wait_until(lambda: engine.llm.engine.has_work, "it never ran")
    num_before = engine.llm.stats.num_aborted
    client.close()
    wait_until(idle(engine), "the request was not freed")
    assert engine.llm.stats.num_aborted == num_before + 1


def test_disconnect_at_the_last_step(backend: LocalBackend, serving: Serving) -> None:
    """Case 26: the answer is complete, and nobody is aborted for nothing."""
    engine, records = backend.engine, Records()
    address = serving(create_app(backend, observers=[records]))
    num_before = engine.llm.stats.num_aborted
    client = RawClient(address, {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True})
    client.read_until(b'"finish_reason":"length"')
    client.close()
    wait_until(lambda: bool(records.all), "no record")
    assert records.all[0].reason in ("", "client")
    assert engine.llm.stats.num_aborted == num_before


def test_slow_client(backend: LocalBackend, serving: Serving) -> None:
    """Case 27: a reader that does not read holds up nobody."""
    engine = backend.engine
    address = serving(create_app(backend))
    slow = RawClient(address, {**LONG, "stream": True, "logprobs": 20, "n": 4}, buffer=4096)
    with httpx2.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=60) as client:
        fast = client.post(TEXT, json={"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True})
        assert fast.json()["usage"]["completion_tokens"] == 30
    assert engine.llm.engine.has_work
    slow.close()
    wait_until(idle(engine), "the request was not freed")


def test_slow_client_is_dropped_when_its_buffer_is_full(serving: Serving) -> None:
    """Case 27."""
    records, text = Records(), "x" * 20_000
    fake = FakeBackend((Begun(((1,),)), *(piece(0, text, step) for step in range(1000)), ended(0, text)))
    address = serving(create_app(fake, ApiConfig(stream_buffer_bytes=200_000), [records]))
    slow = RawClient(address, {"prompt": "a", "stream": True}, buffer=4096)
    wait_until(lambda: bool(records.all), "the slow reader was not dropped")
    assert (records.all[0].status, records.all[0].reason) == (499, "slow_consumer")
    assert fake.generations[0].num_cancelled
    fake.script = (Begun(((1,),)), *(piece(0, "a", step) for step in range(9)), ended(0, "a" * 9))
    fast = RawClient(address, {"prompt": "a", "stream": True})
    assert fast.read_until(b"data: [DONE]\n\n").count(b"data: ") == 11
    slow.close()
    fast.close()


def test_an_event_larger_than_the_buffer_drops_nobody() -> None:
    """The end of a response repeats its text four times."""
    records, text = Records(), "x" * 400
    fake = FakeBackend((Begun(((1,),)), *(piece(0, text, step) for step in range(100)), ended(0, text * 100)))
    app = create_app(fake, ApiConfig(stream_buffer_bytes=20_000), [records])

    async def read() -> str:
        async with client_of(app) as client:
            return (await client.post(RESPONSES, json={"input": "a", "stream": True})).text

    assert "event: response.completed\n" in run(read())
    assert [(record.status, record.reason) for record in records.all] == [(200, "")]


def test_what_observers_raise_costs_nothing(backend: LocalBackend) -> None:
    class Broken:
        def finished(self, record: object) -> None:
            raise RuntimeError("broken")

    records = Records()
    events = stream(create_app(backend, observers=[Broken(), records]), prompt=PROMPT, max_tokens=2)
    assert text_of(events)
    assert len(records.all) == 1
    assert json.dumps(records.all[0].attributes)


@pytest.mark.parametrize("granularity", ["step", "token"])
def test_log_probabilities_stand_with_the_item_of_their_tokens(granularity: Any) -> None:
    """Of a response, however many tokens a step has: before a call, in it, and behind it; whole as streamed."""
    steps: list[list[str | bytes]] = [
        ["H", b"\xc3", b"\xa9", "<tool_call>"],
        ['{"name": "f", ', '"arguments": {}}'],
        ["</tool_call>", " ok", "!"],
    ]
    script: list[Any] = [Begun(((1, 2, 3),))]
    for number, step in enumerate(steps):
        data = [part if isinstance(part, bytes) else part.encode() for part in step]
        words = [(part.decode(errors="replace"), part) for part in data]
        tokens = [TokenEvent(7, word, part, "plain", None, number, logprob=-1.0) for word, part in words]
        script.append(Piece(0, b"".join(data).decode(), tuple(tokens)))
    answer = "".join(one.text for one in script[1:])
    info = msgspec.structs.replace(INFO, tool_style="tags")
    app = create_app(FakeBackend([*script, ended(0, answer)], info), ApiConfig(granularity=granularity))
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = {"input": "a", "tools": [function], "include": ["message.output_text.logprobs"]}

    async def last(is_streamed: bool) -> Any:
        async with client_of(app) as client:
            reply = await client.post("/v1/responses", json={**body, "stream": is_streamed})
            assert reply.status_code == 200, reply.text
            return named_events_of(reply)[-1]["response"] if is_streamed else reply.json()

    found = []
    for response in (run(last(False)), run(last(True))):
        items = [item for item in response["output"] if item["type"] == "message"]
        assert [item["type"] for item in response["output"]] == ["message", "function_call", "message"]
        parts = [item["content"][0] for item in items]
        found.append([(part["text"], [entry["token"] for entry in part["logprobs"]]) for part in parts])
    assert found[0] == found[1]
    assert found[0][0] == ("H\u00e9", ["H", "\ufffd", "\ufffd"])
    assert found[0][1][0].strip() == "ok!"
