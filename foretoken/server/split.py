"""A proxy that divides live traffic between two servers by time, and compares them (`foretoken ab-live`).

Requests and answers pass unchanged, as they come. What is noted is read on the side: no answer waits for it.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import FrameType
from typing import Any

import httpx2
import uvicorn
from starlette.types import Receive, Scope, Send

from foretoken.backend.http_errors import authorities
from foretoken.backend.http_stream import EventReader, Stream, text_of
from foretoken.backend.registry import base_of
from foretoken.measure.ab.live import (
    LiveOptions,
    LiveRequest,
    LiveSums,
    LiveTurn,
    fails_more,
    live_outcome,
    live_report,
    turn_at,
)
from foretoken.measure.report import Report
from foretoken.server.run import listening_socket, url_of

_LOOK_S = 1.0
LEFT = "left"  # the error of a request whose client did not wait for the end
_log = logging.getLogger("foretoken.server")
_CONNECT_S = 10.0
_MAX_READ_BYTES = 16 << 20  # of a whole answer, to find out how many tokens it has
# RFC 9110, section 7.6.1: of one connection each; and the length and host, which the client library sets itself.
_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host".split()
)
_BODY = (b"content-length", b"transfer-encoding")
_UNPACKED = (b"accept-encoding", b"identity")  # in place of the client's own: packed events could not be read
_TIMEOUT = httpx2.Timeout(None, connect=_CONNECT_S)  # how long an answer may take is the client's matter


class Comparison:
    """Whose turn it is, and why it is A's for good once that was decided."""

    def __init__(self, options: LiveOptions, clock: Callable[[], float] = time.perf_counter) -> None:
        self.options, self.sums = options, LiveSums()
        self.ended = ""  # why traffic goes to A for good
        self._clock, self._began_s, self._judged_block = clock, clock(), 0

    def turn(self) -> LiveTurn:
        """Whose turn it is now."""
        now = turn_at(self.options, self._clock() - self._began_s)
        return now if not self.ended else LiveTurn(now.block, "a", is_counted=False)

    def seen(self, request: LiveRequest) -> None:
        """Take in a request; what ended after the decision is not counted."""
        if not self.ended:
            self.sums.add(request)
            if request.error and fails_more(self.sums.sides):
                self.ended = "B fails more requests than A"

    def look(self) -> None:
        """Judge the whole pairs of blocks, once when each is over."""
        block = turn_at(self.options, self._clock() - self._began_s).block // 2 * 2
        if self.ended or block == self._judged_block:
            return
        self._judged_block = block
        verdict = live_outcome(self.sums.blocks(block), self.options.margin).verdict
        if verdict != "go on":
            self.ended = f"B is {verdict}" if verdict != "equivalent" else "the two are equivalent"

    def report(self, command: str) -> Report:
        """What was found so far."""
        return live_report(self.options, self.sums.blocks(self._judged_block), self.sums, self.ended, command)


def run_live(options: LiveOptions, command: str, tell: Callable[[str], None]) -> Report:
    """Divide traffic until Ctrl-C, and report. `tell` hears the address and each decision.

    Raises:
        ConfigError, StorageError: an address or a port that cannot be used.
    """
    comparison = Comparison(options)
    listener = listening_socket(options.host, options.port)
    try:
        tell(f"{url_of(listener, is_tls=False)} passes requests on to A ({options.a}) and B ({options.b}) in turns")
        asyncio.run(_serve(comparison, listener, tell))
    finally:
        listener.close()
    return comparison.report(command)


class _Server(uvicorn.Server):
    """uvicorn that ends at a signal and leaves what comes then to us; at a second one it waits for no answer."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        """SIGINT or SIGTERM came."""
        self.force_exit, self.should_exit = self.should_exit, True


async def _serve(comparison: Comparison, listener: socket.socket, tell: Callable[[str], None]) -> None:
    options = comparison.options
    splitter = Splitter({"a": options.a, "b": options.b}, comparison.turn, comparison.seen)
    server = _Server(server_config(splitter))
    looking = asyncio.create_task(_look(comparison, tell))
    try:
        await server.serve(sockets=[listener])
    finally:
        looking.cancel()
        await splitter.close()


def server_config(splitter: Splitter) -> uvicorn.Config:
    """How the proxy is served: nothing is added to the headers of an answer."""
    config = uvicorn.Config(splitter, lifespan="off", log_config=None, access_log=False)
    config.server_header = config.date_header = False
    return config


async def _look(comparison: Comparison, tell: Callable[[str], None]) -> None:
    while not comparison.ended:
        await asyncio.sleep(_LOOK_S)
        comparison.look()
    tell(f"{comparison.ended}: all requests go to A from now on; Ctrl-C ends the proxy and reports")


class Splitter:
    """Passes requests on. `turn` says whose turn it is, `seen` takes each request that has ended."""

    def __init__(
        self, addresses: dict[str, str], turn: Callable[[], LiveTurn], seen: Callable[[LiveRequest], None]
    ) -> None:
        limits = httpx2.Limits(max_connections=None)
        self._addresses = {side: base_of(address) for side, address in addresses.items()}  # paths are the client's
        is_tls = any(address.startswith("https:") for address in addresses.values())
        self._client = httpx2.AsyncClient(limits=limits, trust_env=False, verify=authorities() if is_tls else True)
        self._turn, self._seen = turn, seen

    async def close(self) -> None:
        """Close the connections to both servers."""
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return
        turn, note = self._turn(), _Note()
        passing = asyncio.create_task(self._pass_on(self._addresses[turn.side], note, scope, send))
        reading = asyncio.create_task(note.read(receive))  # ends when the client has left
        try:
            await asyncio.wait((passing, reading), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
            elif not note.has_ended:
                note.error = LEFT
        except httpx2.HTTPError as error:
            note.error = "connect" if isinstance(error, httpx2.ConnectError) else "cut"
            _log.warning("server %s: %s", turn.side.upper(), type(error).__name__)
            if note.has_begun:
                raise  # the client must see that its answer is cut off
            await _refuse(send)
        finally:
            for task in (passing, reading):
                task.cancel()  # without its client the server need not go on
            await asyncio.gather(passing, reading, return_exceptions=True)
            if scope["method"] == "POST":
                self._seen(note.request(turn))

    async def _pass_on(self, address: str, note: _Note, scope: Scope, send: Send) -> None:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        path = scope.get("raw_path") or scope["path"].encode()
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in (*_HOP, _UNPACKED[0])]
        has_body = any(
            name.lower() in _BODY for name, _ in scope["headers"]
        )  # else the client library would chunk none
        # Not made by the client, which would add headers of its own and the cookies that it kept from other answers.
        request = httpx2.Request(
            scope["method"],
            address + (path + query).decode("ascii"),
            headers=[*headers, _UNPACKED],
            content=note.body() if has_body else None,
            extensions={"timeout": _TIMEOUT.as_dict()},
        )
        answer = await self._client.send(request, stream=True)
        try:
            kept = [pair for pair in answer.headers.raw if pair[0].lower() not in _HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            note.begin(answer.status_code, answer.headers)
            async for data in answer.aiter_raw():
                note.take(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            note.end()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await answer.aclose()


class _Note:
    def __init__(self) -> None:
        self.error, self.has_begun, self.has_ended = LEFT, False, False
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(1)  # of the body, None behind the last
        self._began_s = self._first_s = self._ended_s = time.perf_counter()
        self._num_bytes = self._num_chars = 0
        self._stream = Stream()
        self._events: EventReader | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest, self._whole = "", bytearray()
        self._is_read = False  # a stream has said its end

    async def read(self, receive: Receive) -> None:
        """Take in the body of the request as it comes; returns when the client has left."""
        while (message := await receive())["type"] != "http.disconnect":
            data = message.get("body", b"")
            self._num_bytes += len(data)
            if data:
                await self._parts.put(data)
            if not message.get("more_body", False):
                await self._parts.put(None)

    async def body(self) -> AsyncIterator[bytes]:
        """The body of the request as it comes; one that breaks off never ends."""
        while (data := await self._parts.get()) is not None:
            yield data

    def begin(self, status: int, headers: httpx2.Headers) -> None:
        self.has_begun = True
        self.error = "" if status < 400 else str(status)
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._events = EventReader(self._stream, time.perf_counter)

    def take(self, data: bytes) -> None:
        if self._first_s == self._began_s:
            self._first_s = time.perf_counter()
        if self._events is None:
            if len(self._whole) + len(data) <= _MAX_READ_BYTES:
                self._whole += data
            return
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        self._read(self._events, lines)

    def _read(self, events: EventReader, lines: Sequence[str]) -> None:
        """Read lines of a stream until its [DONE], an error, or an event of another form, which only passes."""
        if self._is_read:
            return
        said = events.read(lines)
        self._is_read = said != "cut"
        if said == "stream" and (events.has_choices or not events.is_foreign):
            self.error = self.error or said

    def end(self) -> None:
        self.has_ended = True
        self._ended_s = time.perf_counter()
        if self._events is not None:
            self._read(self._events, [self._rest])  # the last line may have no end
            if self._events.has_choices and not self._is_read:
                self.error = self.error or "cut"
        elif not self.error:
            self._stream.num_tokens, self._num_chars = _counted(bytes(self._whole))

    def request(self, turn: LiveTurn) -> LiveRequest:
        """The note, with the times of an answer that ended: the first is that of a text where it is a stream of them,
        since servers begin it with other events, some before they have one.
        """
        first_s = self._stream.pieces[0][0] if self._stream.pieces else self._first_s
        times_s = self._ended_s - self._began_s, first_s - self._began_s
        num_chars = self._num_chars if self._events is None else sum(map(len, self._events.texts))
        return LiveRequest(turn, *times_s, self._num_bytes, self._stream.num_tokens, self.error, num_chars)


def _counted(body: bytes) -> tuple[int, int]:
    """The tokens that a whole answer says it has, and the characters of one in OpenAI's form; 0 for what is unknown."""
    try:
        found: Any = json.loads(body)
        usage, choices = found.get("usage") or {}, found.get("choices") or ()
        num_chars = sum(len(text_of(choice, "message")) for choice in choices)
        return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0), num_chars
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 0, 0


async def _refuse(send: Send) -> None:
    body = b'{"error": {"message": "the server behind this proxy does not answer", "type": "server_error"}}'
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-type", b"application/json"),)
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
