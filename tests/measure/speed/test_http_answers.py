"""Answers of servers over HTTP: thinking, SGLang's reports of drafting, and where a line of a stream ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foretoken.backend.answering import SERVED, Drafting, Question
from foretoken.backend.http import Endpoint, HttpBackend, ServerAddress
from foretoken.backend.http_errors import retry_after_s
from foretoken.backend.http_requests import HttpRequester
from foretoken.backend.http_stream import EventReader, Stream, lines_of, lines_of_async, read_spec_counters
from foretoken.backend.requesting import ApiChoice, ApiRequest
from foretoken.errors import ForetokenError, InputError, UnavailableError
from foretoken.measure.certify import forms
from tests.measure.endpoint import Fake, Reply, serving, tokens

OWN = Drafting(SERVED)
CHAT = (("user", "hi"),)
SPEC = {"spec_num_proposed_drafts": 24, "spec_num_correct_drafts": 9, "spec_verify_ct": 3}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as found:
        yield found


def streamed(*deltas: dict[str, Any], num_tokens: int) -> Reply:
    """A chat whose usage comes at its end alone."""
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return Reply((*events, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}))


# ---- thinking


def read(events: Sequence[dict[str, Any]]) -> EventReader:
    """A second passes from one event to the next."""
    seconds = iter(range(100))
    reader = EventReader(Stream(), lambda: float(next(seconds)))
    assert reader.read([*(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]) == ""
    return reader


@pytest.mark.parametrize("names", [("reasoning_content",), ("reasoning",), ("reasoning", "reasoning_content")])
def test_every_token_of_thinking_is_timed(names: tuple[str, ...]) -> None:
    thought: dict[str, Any] = {"content": None} | dict.fromkeys(names, " x")
    events = streamed({"role": "assistant", "content": ""}, *[thought] * 3, {"content": " y"}, num_tokens=4).events
    reader = read(events)
    assert reader.stream.pieces == [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]
    assert (reader.stream.num_tokens, "".join(reader.texts)) == (4, " x x x y")


def test_an_answer_that_still_thinks_has_times_and_a_text(fake: Fake) -> None:
    fake.answer = lambda _number, _body: streamed(*[{"reasoning_content": " x"}] * 5, num_tokens=5)
    backend = HttpBackend(ServerAddress(fake.url))
    answer = backend.answer(Question(messages=CHAT), OWN)
    backend.close()
    assert (answer.num_emitted, answer.decode_tokens, answer.text) == (5, 4, " x" * 5)
    assert answer.decode_s > 0


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_begins_with_its_thinking(fake: Fake, name: str, stream: bool) -> None:
    whole = {"choices": [{"message": {name: "a b", "content": "{}"}, "finish_reason": "stop"}]}
    parts = streamed({name: "a"}, {name: " b"}, {"content": "{"}, {"content": "}"}, num_tokens=4)
    fake.answer = lambda _number, body: parts if body["stream"] else Reply(body=json.dumps(whole).encode())
    backend = HttpBackend(ServerAddress(fake.url))
    reply = HttpRequester(backend, OWN).ask(ApiRequest(messages=CHAT, stream=stream))
    backend.close()
    assert [(one.text, one.thinking) for one in reply.choices] == [("a b{}", "a b")]


def test_json_is_looked_for_behind_the_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_value_problem", lambda text: text)
    assert forms._json_problem(ApiChoice("so {}", "stop", thinking="so ")) == "{}"
    assert forms._json_problem(ApiChoice("so {}", "stop")) == "so {}"


# ---- SGLang


class Sglang(Fake):
    """It refuses `return_meta_info` in streams, as SGLang's chats do; `server_version` "": it does not say which."""

    server_version = "0.5.23"

    def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        if path == "/server_info":
            found = {"version": self.server_version} if self.server_version else {}
            return 200, "application/json", json.dumps(found).encode()
        asked = json.loads(body) if body else {}
        if asked.get("stream") and asked.get("return_meta_info"):
            said = {"object": "error", "message": "return_meta_info is not supported with streaming.", "code": 400}
            return 400, "application/json", json.dumps(said).encode()
        return super().reply(path, headers, body)


@pytest.mark.parametrize("question", [Question("x"), Question(messages=CHAT)], ids=["text", "chat"])
def test_sglang_reports_where_it_is_asked_in_a_way_that_streams_take(question: Question) -> None:
    def answer(_number: int, body: dict[str, Any]) -> Reply:
        assert body["return_spec_tokens_details"] is True
        events = tokens("a", "b").events
        return Reply((*events, {"choices": [], "sglext": {"spec_tokens_details": SPEC}}))

    with serving(Sglang(answer, owner="sglang")) as fake:
        backend = HttpBackend(ServerAddress(fake.url))
        found = backend.answer(question, OWN)
        backend.close()
    assert (found.num_drafted, found.num_accepted, found.num_steps) == (24, 9, 3)
    assert backend.capabilities.draft_counts == "total"


@pytest.mark.parametrize(
    ("version", "counts"),
    [("0.5.10", "none"), ("0.5.21", "total"), ("0.5.22.post1", "total"), ("0.6.0rc1", "total"), ("", "none")],
)
def test_only_an_sglang_that_reports_in_streams_is_taken_to(version: str, counts: str) -> None:
    server = Sglang(owner="sglang")
    server.server_version = version
    with serving(server) as fake:
        backend = HttpBackend(ServerAddress(fake.url))
        assert backend.answer(Question(messages=CHAT), OWN).num_drafted is None
        backend.close()
    assert backend.capabilities.draft_counts == counts


# ---- lines


RAW = "a\u2028b\u2029c\u0085d\x0ce"
BODY = f'data: {{"choices": [{{"index": 0, "text": "{RAW}"}}]}}\r\n\r\ndata: [DONE]'.encode()


def bytewise(body: bytes) -> Iterable[bytes]:
    return (body[place : place + 1] for place in range(len(body)))


async def lines_at_once(body: bytes) -> list[str]:
    async def parts() -> AsyncIterator[bytes]:
        for part in bytewise(body):
            yield part

    return [line async for line in lines_of_async(parts())]


@pytest.mark.parametrize("body", [BODY, BODY + b"\n", b"\xff\n", b""], ids=["open", "ended", "no UTF-8", "empty"])
def test_only_a_line_feed_ends_a_line(body: bytes) -> None:
    expected = [line.removesuffix("\r") for line in body.decode(errors="replace").split("\n")]
    assert list(lines_of(bytewise(body))) == list(lines_of([body])) == expected
    assert asyncio.run(lines_at_once(body)) == expected


def test_separators_within_a_text_do_not_break_a_stream(fake: Fake) -> None:
    raw = BODY.replace(b"\x0c", b"")  # JSON takes no form feed
    fake.answer = lambda _number, _body: Reply(body=raw)
    backend = HttpBackend(ServerAddress(fake.url))
    assert backend.answer(Question("x"), OWN).text == RAW.replace("\x0c", "")
    (choice,) = HttpRequester(backend, OWN).ask(ApiRequest("x", stream=True)).choices
    backend.close()
    assert choice.text == RAW.replace("\x0c", "")

    async def send() -> Stream:
        stream = Stream()
        async with Endpoint(ServerAddress(fake.url, "m")) as endpoint:
            await endpoint.send(Question("x"), stream, time.monotonic)
        return stream

    found = asyncio.run(send())
    assert (found.error, found.num_tokens) == ("", 1)


# ---- servers that do not keep to the form

ODD: list[dict[str, Any]] = [
    {"choices": ["a"]},
    {"choices": [{"index": 0, "delta": "x"}]},
    {"choices": 5},
    {"choices": [], "usage": "none"},
]


@pytest.mark.parametrize("event", ODD, ids=["choice", "delta", "choices", "usage"])
def test_an_event_in_another_form_is_an_error_of_the_answer(fake: Fake, event: dict[str, Any]) -> None:
    fake.answer = lambda _number, _body: Reply((*tokens("a").events, event, *tokens("b").events))
    backend = HttpBackend(ServerAddress(fake.url))
    with pytest.raises(ForetokenError, match=r"gave no whole answer \(stream: \{"):
        backend.answer(Question("x"), OWN)
    backend.close()

    async def send() -> Stream:
        stream = Stream()
        async with Endpoint(ServerAddress(fake.url, "m")) as endpoint:
            await endpoint.send(Question("x"), stream, time.monotonic)
        return stream

    assert asyncio.run(send()).error == "stream"


def test_a_line_that_only_looks_like_a_series_is_passed_over() -> None:
    page = "x:spec_decode_num_draft_tokens_total many\n"
    assert read_spec_counters(page) is None
    assert read_spec_counters(
        f"{page}x:spec_decode_num_draft_tokens_total 3\nx:spec_decode_num_accepted_tokens_total 1\n"
    ) == {"drafted": 3.0, "accepted": 1.0}


def test_a_page_that_never_comes_is_not_waited_for_as_long_as_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server = ServerAddress(url, timeout_s=0.2)
        with pytest.raises(UnavailableError, match=r"gave no model \(no answer in time\): is the server running"):
            HttpBackend(server)
    assert ServerAddress(url).page_timeout.read == 60.0
    assert server.page_timeout.read == 0.2


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate that no authority has signed, and what serves with it."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_certificate_that_is_refused_is_named_with_the_remedy(
    signed: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, context = signed
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with serving(Fake(tls=context)) as fake:
        refused = r"CERTIFICATE_VERIFY_FAILED.*; name the certificate .* in \$SSL_CERT_FILE"
        with pytest.raises(UnavailableError, match=refused):
            HttpBackend(ServerAddress(fake.url))
        stream = Stream()

        async def send() -> None:
            async with Endpoint(ServerAddress(fake.url, "m")) as endpoint:
                await endpoint.send(Question("x"), stream, time.monotonic)

        asyncio.run(send())
        assert stream.error == "connect"
        assert "SSL_CERT_FILE" in stream.said
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        backend = HttpBackend(ServerAddress(fake.url))
        assert backend.answer(Question("x"), Drafting(SERVED)).text == "abc"
        backend.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("none.pem")))
        with pytest.raises(InputError, match="SSL_CERT_FILE="):
            HttpBackend(ServerAddress(fake.url))


def test_a_redirection_says_where_to() -> None:
    class Moved(Fake):
        def reply(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
            return 308, "text/plain\r\nlocation: https://other.example/v1/models", b""

    with (
        serving(Moved()) as fake,
        pytest.raises(UnavailableError, match=r"\(status 308: moved to https://other.example/v1/models: give that"),
    ):
        HttpBackend(ServerAddress(fake.url))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>Welcome</html>", "no JSON: <html>Welcome</html>"),
        (b'["m"]', "no list of models"),
        (b'{"data": ["m"]}', "no list of models"),
        (b'{"models": []}', "no list of models"),
    ],
)
def test_a_page_that_lists_no_models_is_shown(body: bytes, why: str) -> None:
    class Other(Fake):
        def reply(self, path: str, headers: dict[str, str], body_: bytes) -> tuple[int, str, bytes]:
            return 200, "text/html", body

    with serving(Other()) as fake, pytest.raises(UnavailableError, match=f"gave no model .{why}.: is the server"):
        HttpBackend(ServerAddress(fake.url))


def test_what_comes_in_place_of_a_stream_is_shown(fake: Fake) -> None:
    backend = HttpBackend(ServerAddress(fake.url))
    for body in (b"<html>login</html>", b'{"choices": [{"text": "a"}]}'):
        fake.answer = lambda _number, _body, body=body: Reply(body=body)  # type: ignore[misc]
        with pytest.raises(ForetokenError, match="no whole answer") as failed:
            backend.answer(Question("x"), OWN)
        assert str(failed.value).endswith(f"(cut: {body.decode()})")
    backend.close()


def test_an_answer_that_a_server_gives_up_is_not_whole() -> None:
    def failed(*lines: str) -> tuple[str, str]:
        reader = EventReader(Stream(), time.perf_counter)
        return reader.read(lines), reader.stream.said

    text = 'data: {"choices": [{"text": "a"}]}'
    error = 'error: {"code": 500, "message": "context shift is disabled", "type": "server_error"}'
    for before in ((), (text, "")):
        assert failed(*before, error) == ("stream", "context shift is disabled")
    aborted = 'data: {"choices": [{"text": "", "finish_reason": "abort"}]}'
    assert failed(text, aborted, "data: [DONE]") == ("stream", "the answer ended with finish_reason 'abort'")
    assert failed(text, aborted.replace("abort", "stop"), "data: [DONE]") == ("", "")


def test_an_answer_says_whether_its_tokens_were_counted(fake: Fake) -> None:
    backend = HttpBackend(ServerAddress(fake.url))
    assert backend.answer(Question("x"), OWN).is_counted
    fake.answer = lambda _number, _body: Reply(({"choices": [{"index": 0, "text": "a b c"}]},))
    answer = backend.answer(Question("x"), OWN)
    backend.close()
    assert (answer.is_counted, answer.num_emitted) == (False, 1)


# ---- a server without room


@pytest.mark.parametrize(
    ("said", "low", "high"),
    [
        (None, 1, 1),
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("0", 0.1, 0.1),
        ("-3", 0.1, 0.1),
        ("soon", 1, 1),
        ("nan", 1, 1),
    ],
)
def test_when_a_server_may_be_asked_again(said: str | None, low: float, high: float) -> None:
    assert low <= retry_after_s(httpx2.Response(429, headers={} if said is None else {"retry-after": said})) <= high


def test_a_server_may_name_the_time_of_day() -> None:
    said = format_datetime(datetime.now(UTC) + timedelta(hours=100), usegmt=True)
    assert 0 < retry_after_s(httpx2.Response(429, headers={"retry-after": said})) <= 360_000
    past = format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)
    assert 0 < retry_after_s(httpx2.Response(429, headers={"retry-after": past})) <= 1


@pytest.mark.parametrize(
    ("refusals", "status", "num_asked", "refused"),
    [(3, 429, 4, ""), (10_000, 429, 121, "status 429: full"), (1, 400, 1, "status 400: full")],
)
def test_a_server_without_room_is_asked_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, refusals: int, status: int, num_asked: int, refused: str
) -> None:
    """A full queue is no refusal of what was asked; a server that stays full is one."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    full = Reply(status=status, body=b'{"error": {"message": "full"}}')
    whole = Reply(body=b'{"choices": [{"text": "a"}]}')
    fake.answer = lambda number, _body: full if number < refusals else whole
    backend = HttpBackend(ServerAddress(fake.url))
    reply = HttpRequester(backend, OWN).ask(ApiRequest("x"))
    backend.close()
    assert (len(fake.asked), len(waits), reply.refused) == (num_asked, num_asked - 1, refused)
