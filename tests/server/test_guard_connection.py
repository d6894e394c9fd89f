"""The guard on real sockets: slow, endless and oversized requests, and the number of connections."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from foretoken.server.guard.app import Guard
from foretoken.server.guard.config import MIB, GuardConfig
from foretoken.server.guard.connection import uvicorn_options
from foretoken.server.run import listening_socket

_PATIENCE_S = 60.0  # until a test gives up; nothing depends on it
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


async def echo_length(scope: Any, receive: Any, send: Any) -> None:
    """Counts the body without keeping it."""
    count, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        count, more = count + len(message["body"]), message["more_body"]
    body = str(count).encode()
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


class Running:
    """A server with its port."""

    def __init__(self, config: GuardConfig) -> None:
        self.server = uvicorn.Server(
            uvicorn.Config(
                Guard(echo_length, config),
                port=0,
                lifespan="off",
                log_level="critical",
                **uvicorn_options(config),
            )
        )

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def until(self, count: int) -> None:
        """Wait for a number of open connections."""
        while self.num_connections != count:
            await asyncio.sleep(0.005)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def talk(self, *data: bytes) -> bytes:
        """All that is answered to `data` until the connection is closed."""
        reader, writer = await self.connect()
        try:
            for part in data:
                writer.write(part)
                await writer.drain()
            return await reader.read()
        except ConnectionError:  # closed with bytes unread
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def serving(config: GuardConfig) -> AsyncIterator[Running]:
    running = Running(config)
    task = asyncio.create_task(running.server.serve())
    while not running.server.started:
        await asyncio.sleep(0.005)
    try:
        yield running
    finally:
        running.server.should_exit = True
        await task


def served(config: GuardConfig, play: Callable[[Running], Coroutine[Any, Any, None]]) -> None:
    """Nothing that a client sends may break a connection's own code, which the event loop would log."""
    broken: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: broken.append(context))
        async with asyncio.timeout(60), serving(config) as running:
            await play(running)

    asyncio.run(run())
    assert not broken


def resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


def test_giant_body() -> None:
    """Case 16."""

    async def play(running: Running) -> None:
        size = 33 * MIB
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        piece, before = b"x" * MIB, resident_mib()
        announced = await running.talk(head + f"Content-Length: {size}\r\n\r\n".encode(), *[piece] * 33)
        chunk = b"100000\r\n" + piece + b"\r\n"
        endless = await running.talk(head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 33, b"0\r\n\r\n")
        for answer in (announced, endless):
            front, _, body = answer.partition(b"\r\n\r\n")
            assert front.startswith(b"HTTP/1.1 413 ")
            assert b"content-type: application/json" in front
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "body_too_large")
            assert str(32 * MIB) in error["message"]
        assert resident_mib() - before < 16  # neither body was kept
        largest = await running.talk(head + f"Content-Length: {32 * MIB}\r\n\r\n".encode(), *[piece] * 32)
        assert largest.endswith(str(32 * MIB).encode())

    served(GuardConfig(), play)


def test_giant_headers() -> None:
    """Case 17."""

    async def play(running: Running) -> None:
        many, long = [b"a: b\r\n" * 1000] * 100, [b"a: ", *[b"b" * MIB] * 32]
        before = resident_mib()
        for lines in (many, long, many[:1]):
            answer = await running.talk(REQUEST, *lines, b"\r\n\r\n")
            assert answer == b"" or answer.split()[1] in (b"400", b"431")
            await running.until(0)
        assert resident_mib() - before < 16
        reader, writer = await running.connect()  # endless ones: closed before 128 KiB could be sent
        writer.write(REQUEST)
        sent = 0
        try:
            while sent < MIB:
                writer.write(b"a: b\r\n" * 100)
                await writer.drain()
                sent += 600
                await asyncio.sleep(0)
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        writer.close()
        assert answer == b"" or b" 400 " in answer or b" 431 " in answer
        assert (await running.talk(REQUEST + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")

    served(GuardConfig(), play)


async def trickle(running: Running, head: bytes) -> bytes:
    """A byte at a time until the server closes; what it answered."""
    reader, writer = await running.connect()
    parts: list[bytes] = []

    async def listen() -> None:
        try:
            while part := await reader.read(1 << 16):
                parts.append(part)
        except ConnectionError:
            return

    listening = asyncio.create_task(listen())
    try:
        writer.write(head)
        while not listening.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        await listening
    finally:
        writer.close()
    return b"".join(parts)


def test_slowloris() -> None:
    """Case 28: slow headers and bodies end with their timeout."""

    async def play(running: Running) -> None:
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        silent, headers, body, again = await asyncio.gather(
            running.talk(),
            trickle(running, REQUEST + b"a: "),
            trickle(running, post),
            trickle(running, REQUEST + b"\r\n" + REQUEST + b"a: "),  # a second request on the same connection
        )
        assert (silent, headers) == (b"", b"")
        assert body.startswith(b"HTTP/1.1 408 ")
        assert again.startswith(b"HTTP/1.1 200 ")
        assert again.count(b"HTTP/1.1") == 1
        refused = await trickle(running, b"POST /admin HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 403 ")  # and it could not go on sending its body
        await running.until(0)

    served(GuardConfig(header_timeout_s=0.3, body_timeout_s=0.3, keep_alive_s=0.3), play)


def test_slowloris_of_idle_connections() -> None:
    """Case 28: 200 idle connections block nobody."""

    async def play(running: Running) -> None:
        idle = [await running.connect() for _ in range(200)]
        await running.until(200)
        assert (await running.talk(REQUEST + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await running.until(200)
        for _, writer in idle:
            writer.close()
        await running.until(0)

    served(GuardConfig(header_timeout_s=60.0, max_connections=201), play)


def test_a_connection_too_many_is_refused() -> None:
    async def play(running: Running) -> None:
        kept = [await running.connect() for _ in range(2)]
        await running.until(2)
        answer = await running.talk()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "unavailable_error"
        for _, writer in kept:
            writer.close()
        await running.until(0)
        assert (await running.talk(REQUEST + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")

    served(GuardConfig(max_connections=2), play)


def test_a_connection_too_many_takes_the_place_of_the_idlest() -> None:
    async def play(running: Running) -> None:
        connections = [await running.connect() for _ in range(3)]
        (first, asking), (second, writer), (silent, _) = connections
        for reader, one in ((first, asking), (second, writer)):
            one.write(REQUEST + b"\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await running.talk(REQUEST + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
        rest = await asyncio.wait_for(first.read(), _PATIENCE_S)
        assert b"200" not in rest  # the end of its answer, and then that of the connection
        writer.write(REQUEST + b"Connection: close\r\n\r\n")
        assert (await second.read()).count(b"HTTP/1.1 200") == 1
        assert not silent.at_eof()  # one that has not asked yet is no idle one: its time for headers runs
        for _, one in connections:
            one.close()
        await running.until(0)

    served(GuardConfig(max_connections=3), play)


def test_what_is_not_http_gets_the_envelope() -> None:
    async def play(running: Running) -> None:
        answer = await running.talk(b"HELLO\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"

    served(GuardConfig(), play)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
JSON_BODY = b'{"model": "m", "prompt": "a"}'
CHUNKED_BODY = b"1d\r\n" + JSON_BODY + b"\r\n0\r\n\r\n"
BOTH = b"Content-Length: 29\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


UNCERTAIN = [
    (POST + BOTH, JSON_BODY),
    (POST + BOTH, CHUNKED_BODY),
    (POST + BOTH, b""),
    (REQUEST + BOTH, b""),
    (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n", CHUNKED_BODY),
    (POST.replace(b"1.1", b"1.0") + CHUNKED, CHUNKED_BODY),
    (POST + CHUNKED, JSON_BODY),
    (POST + CHUNKED, b'"a"'),
    (POST + CHUNKED, b"1\r\na\r\n" + JSON_BODY),
    (POST + CHUNKED, b"1d\r\n" + JSON_BODY + b"xx"),
    (POST + CHUNKED, b"zz\r\n"),
    (POST + CHUNKED, b"-1\r\n"),
    (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", JSON_BODY),
    (POST + b"Transfer-Encoding: identity\r\n\r\n", JSON_BODY),
    (POST + b"Content-Length: 29, 30\r\n\r\n", JSON_BODY),
    (POST + b"Content-Length: 29\r\nContent-Length: 30\r\n\r\n", JSON_BODY),
    (POST + b"Content-Length: -1\r\n\r\n", JSON_BODY),
    (POST + b"Content-Length: 0x1d\r\n\r\n", JSON_BODY),
]


@pytest.mark.parametrize("is_split", [False, True])
def test_h2_a_body_whose_end_is_uncertain_is_400_at_once(is_split: bool) -> None:
    """No answer waits for bytes that never come: the body's own time is longer than the test would last."""

    async def play(running: Running) -> None:
        for head, body in UNCERTAIN:
            reader, writer = await running.connect()
            for part in (head, body) if is_split else (head + body,):
                writer.write(part)
                await writer.drain()
            async with asyncio.timeout(60.0):
                line = await reader.readline()
            assert line.split()[1] == b"400", (head, body, line)
            writer.close()

    served(GuardConfig(body_timeout_s=600.0), play)


def test_h2_a_body_in_chunks_may_come_in_any_pieces() -> None:
    body = CHUNKED_BODY.replace(b"1d\r\n", b'1D;name="{"\r\n').replace(b"0\r\n", b"0\r\nX-Sum: 1\r\n")

    async def play(running: Running) -> None:
        for cut in range(1, len(body), 3):
            reader, writer = await running.connect()
            writer.write(POST + b"Connection: close\r\n" + CHUNKED)
            for part in (body[:cut], body[cut : cut + 2], body[cut + 2 :]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"29")
            writer.close()

    served(GuardConfig(), play)


def test_a_body_of_tiny_chunks_is_refused() -> None:
    """Three clients that sent a byte in each chunk held up all others for 20 s, with a key or without."""

    async def play(running: Running) -> None:
        answer = await running.talk(POST + CHUNKED + b"1\r\na\r\n" * 5000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
        for chunk, count in ((b"1\r\na\r\n", 1000), (b"20\r\n" + b"a" * 32 + b"\r\n", 5000)):
            body = chunk * count + b"0\r\n\r\n"
            answer = await running.talk(POST + b"Connection: close\r\n" + CHUNKED + body)
            assert answer.startswith(b"HTTP/1.1 200 ")
        reader, writer = await running.connect()
        for _ in range(3):  # each request of a connection is counted by itself
            writer.write(POST + CHUNKED + b"1\r\na\r\n" * 1000 + b"0\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(4) == b"1000"
        writer.close()

    served(GuardConfig(), play)


def test_pieces_of_an_answer_leave_at_once() -> None:
    """Without TCP_NODELAY the second small write of an answer waits 40 ms for the client's acknowledgement."""
    found: list[int] = []

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect() -> None:
        listener = listening_socket("127.0.0.1", 0)
        async with await asyncio.start_server(talk, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert found[0]
