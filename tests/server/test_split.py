"""The proxy of `ab-live`: answers pass unchanged, what is noted of them, and to whom requests go."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx2
import pytest
from starlette.types import Message, Receive, Scope, Send

from foretoken.backend.call import Begun
from foretoken.measure.ab.live import LiveOptions, LiveRequest, LiveTurn
from foretoken.server.api.app import create_app
from foretoken.server.split import Comparison, Splitter, server_config
from tests.helpers.fake_backend import FakeBackend, ended, piece
from tests.helpers.http import JSON, Serving, client_of

HELLO: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
CHAT = "/v1/chat/completions"
PARTED = (Begun(((1, 2, 3),)), piece(0, "a" * 10), piece(0, "b" * 10, 1), ended(0, "a" * 10 + "b" * 10))


class Turns:
    """A proxy in front of two servers; `side` is whose turn it is."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.side, self.seen = "a", list[LiveRequest]()
        self._addresses = addresses

    def send(self, *asked: tuple[str, str, Any]) -> list[httpx2.Response]:
        """The answers to (method, path, body), one after the other."""

        async def run() -> list[httpx2.Response]:
            splitter = Splitter(self._addresses, lambda: LiveTurn(0, self.side, True), self.seen.append)
            async with client_of(splitter) as client:
                found = []
                for method, path, body in asked:
                    content = None if body is None else json.dumps(body).encode()
                    found.append(await client.request(method, path, content=content, headers=JSON))
            await splitter.close()
            return found

        return asyncio.run(run())


@pytest.fixture
def turns(serving: Serving) -> Turns:
    hosts = {side: serving(create_app(FakeBackend(PARTED))) for side in ("a", "b")}
    return Turns({side: f"http://{host}:{port}/" for side, (host, port) in hosts.items()})


def test_answers_pass_as_they_are(turns: Turns) -> None:
    whole, stream, listed, bad = turns.send(
        ("POST", CHAT, HELLO),
        ("POST", CHAT, HELLO | {"stream": True}),
        ("GET", "/v1/models?x=1", None),
        ("POST", CHAT, {"messages": []}),
    )
    assert whole.json()["choices"][0]["message"]["content"] == "a" * 10 + "b" * 10
    assert whole.headers["x-request-id"]
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")
    assert stream.text.count('"content":"aaaaaaaaaa"') == 1
    assert listed.json()["data"][0]["id"] == "fake"
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "messages")


def test_what_is_noted(turns: Turns) -> None:
    told = {"stream": True, "stream_options": {"include_usage": True}}
    turns.send(
        ("POST", CHAT, HELLO),
        ("POST", CHAT, HELLO | told),
        ("POST", CHAT, HELLO | {"stream": True}),
        ("GET", "/v1/models", None),
        ("POST", CHAT, {"messages": []}),
    )
    assert [(one.num_tokens, one.num_chars, one.error) for one in turns.seen] == [
        (2, 20, ""),
        (2, 20, ""),
        (0, 20, ""),
        (0, 0, "400"),
    ]
    assert all(one.e2e_s >= one.ttft_s > 0 for one in turns.seen[:3])
    assert turns.seen[0].num_prompt_bytes == len(json.dumps(HELLO))


def test_the_first_text_of_a_stream_is_timed_and_not_its_first_event(serving: Serving) -> None:
    """A server may name the role, or keep the connection awake, long before it has a text."""

    async def server(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        role: Any = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        text: Any = {"choices": [{"index": 0, "delta": {"content": "text"}}]}
        await send({"type": "http.response.body", "body": f"data: {json.dumps(role)}\n\n".encode(), "more_body": True})
        await asyncio.sleep(0.3)
        body = f"data: {json.dumps(text)}\n\ndata: [DONE]\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    host, port = serving(server)
    turns = Turns({"a": f"http://{host}:{port}"})
    turns.send(("POST", CHAT, HELLO | {"stream": True}))
    assert turns.seen[0].ttft_s >= 0.3


TEXT = 'data: {"choices": [{"index": 0, "delta": {"content": "text"}}]}\n\n'


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TEXT + "data: [DONE]\n\n", ""),
        (TEXT + "data: [DONE]", ""),
        (TEXT, "cut"),
        (TEXT + "data: text\n\n", "stream"),
        (TEXT + 'data: {"error": {"message": "lost"}}\n\n' + TEXT, "stream"),
        ('data: {"error": {"message": "lost"}}\n\n', "stream"),
        ("error: lost\n\n", "stream"),
        ("data: text\n\ndata: more\n\n", ""),
        ('data: ["text"]\n\n', ""),
        ('event: text\ndata: {"type": "text", "usage": 3}\n\n', ""),
    ],
)
def test_how_a_stream_ends(serving: Serving, body: str, error: str) -> None:
    """In OpenAI's form with [DONE], as `foretoken ab` and `bench url` demand it; other forms have ends of their own."""

    async def server(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode(), "more_body": False})

    host, port = serving(server)
    turns = Turns({"a": f"http://{host}:{port}"})
    (answer,) = turns.send(("POST", CHAT, HELLO | {"stream": True}))
    assert answer.text == body
    assert turns.seen[0].error == error


@pytest.mark.parametrize("prefix", ["", "/", "/v1", "/v1/"])
def test_the_version_of_the_api_in_an_address_is_not_asked_twice(serving: Serving, prefix: str) -> None:
    host, port = serving(create_app(FakeBackend()))
    (found,) = Turns({"a": f"http://{host}:{port}{prefix}"}).send(("GET", "/v1/models", None))
    assert found.status_code == 200


def test_a_request_without_a_body_gets_none(serving: Serving) -> None:
    asked: list[dict[bytes, bytes]] = []

    async def server(scope: Scope, _receive: Receive, send: Send) -> None:
        asked.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    host, port = serving(server)
    Turns({"a": f"http://{host}:{port}"}).send(("GET", "/v1/models", None), ("HEAD", "/health", None))
    assert not {b"transfer-encoding", b"content-length"} & {name for one in asked for name in one}


def test_no_header_is_added_to_an_answer() -> None:
    config = server_config(Splitter({}, lambda: LiveTurn(0, "a", True), lambda _: None))
    config.load()
    assert config.encoded_headers == []


def test_requests_go_to_whose_turn_it_is(serving: Serving, turns: Turns) -> None:
    backends = {side: FakeBackend() for side in ("a", "b")}
    hosts = {side: serving(create_app(backend)) for side, backend in backends.items()}
    turns = Turns({side: f"http://{host}:{port}" for side, (host, port) in hosts.items()})
    for side in ("a", "b", "b"):
        turns.side = side
        turns.send(("POST", CHAT, HELLO))
    assert [len(backends[side].calls) for side in ("a", "b")] == [1, 2]


def test_nothing_is_added_to_a_request_and_no_cookie_of_another(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    asked: list[dict[bytes, bytes]] = []

    async def server(scope: Scope, _receive: Receive, send: Send) -> None:
        asked.append(dict(scope["headers"]))
        headers = [(b"set-cookie", b"session=of-the-first"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def run() -> list[int]:
        host, port = serving(server)
        splitter = Splitter({"a": f"http://{host}:{port}"}, lambda: LiveTurn(0, "a", True), lambda _: None)
        sent: list[int] = []

        async def send(message: Message) -> None:
            sent.extend([message["status"]] if "status" in message else [])

        for own in ([], [(b"accept-encoding", b"gzip"), (b"user-agent", b"own")]):
            came: list[Message] = [{"type": "http.request", "body": b"{}"}]

            async def receive(came: list[Message] = came) -> Message:
                return came.pop() if came else await asyncio.Event().wait()  # type: ignore[return-value]

            headers = [(b"content-length", b"2"), *own]
            scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
            await splitter(scope, receive, send)
        await splitter.close()
        return sent

    assert asyncio.run(run()) == [200, 200]
    first, second = ({name: value for name, value in one.items() if name != b"host"} for one in asked)
    assert first == {b"content-length": b"2", b"accept-encoding": b"identity"}
    assert second == first | {b"user-agent": b"own"}


def test_a_server_that_is_not_there_is_an_error_of_its_own() -> None:
    turns = Turns({"a": "http://127.0.0.1:9"})
    (found,) = turns.send(("POST", CHAT, HELLO))
    assert (found.status_code, turns.seen[0].error) == (502, "connect")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_ends_its_request_at_the_server(serving: Serving, is_streamed: bool) -> None:
    has_heard = threading.Event()

    async def endless(_scope: Scope, receive: Receive, send: Send) -> None:
        if is_streamed:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        has_heard.set()

    async def leave() -> list[LiveRequest]:
        host, port = serving(endless)
        seen, leaves = list[LiveRequest](), asyncio.Event()
        came: list[Message] = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Message:
            if came:
                return came.pop()
            if is_streamed:
                await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message.get("body"):
                leaves.set()

        splitter = Splitter({"a": f"http://{host}:{port}"}, lambda: LiveTurn(0, "a", True), seen.append)
        headers = [(b"content-length", b"2")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
        async with asyncio.timeout(20):
            await splitter(scope, receive, send)
        assert await asyncio.to_thread(has_heard.wait, 20)
        await splitter.close()
        return seen

    assert [one.error for one in asyncio.run(leave())] == ["left"]


def test_traffic_goes_back_to_a_once_it_is_decided() -> None:
    now = [0.0]
    comparison = Comparison(LiveOptions("http://a:1", "http://b:1", block_s=10, washout_s=2), lambda: now[0])
    while not comparison.ended:
        now[0] += 5
        turn = comparison.turn()
        comparison.seen(LiveRequest(turn, 2.0 if turn.side == "b" else 1.0, 0.5, 10, 10))
        comparison.look()
        assert now[0] < 1000
    assert comparison.ended == "B is slower"
    assert {comparison.turn().side for _ in range(3)} == {"a"}
    count = comparison.sums.sides["a"].num_requests
    comparison.seen(LiveRequest(comparison.turn(), 1, 1, 1, 1))
    assert comparison.sums.sides["a"].num_requests == count
    report = comparison.report("foretoken ab-live")
    assert report.verdict.startswith("B is slower: B runs at 0.50x [")
    assert not report.passed


def test_a_server_that_fails_is_left() -> None:
    now = [0.0]
    comparison = Comparison(LiveOptions("http://a:1", "http://b:1", block_s=10, washout_s=0), lambda: now[0])
    for _ in range(80):
        now[0] += 1
        turn = comparison.turn()
        comparison.seen(LiveRequest(turn, 1.0, 0.5, 10, 10, "500" if turn.side == "b" else ""))
    assert comparison.ended == "B fails more requests than A"
    report = comparison.report("foretoken ab-live")
    assert report.verdict.endswith("B fails more requests than A.")
    assert not report.passed
