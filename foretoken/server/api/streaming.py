"""Server-sent events: when pieces are sent, and a bounded buffer between them and a socket that may be slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from foretoken.backend.call import Event, Piece, RoundEvent
from foretoken.server.api.config import ApiConfig
from foretoken.server.api.envelopes import error_event, wire_of
from foretoken.server.api.errors import CLIENT_GONE, ApiError, final
from foretoken.server.api.exchange import Exchange, hung_up, stop
from foretoken.server.api.token_texts import TextDivision

_log = logging.getLogger("foretoken.server")
DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


@dataclass
class PieceGroup:
    """Pieces of one answer that are sent as one."""

    piece: Piece
    rounds: list[RoundEvent]


async def grouped(events: AsyncIterator[Event], config: ApiConfig) -> AsyncGenerator[Event | PieceGroup]:
    """The events of a call in their order for each answer, pieces grouped as the settings say."""
    if config.interval_s:
        async with contextlib.aclosing(_by_interval(events, config.interval_s)) as groups:
            async for group in groups:
                yield group
        return
    texts: defaultdict[int, TextDivision] = defaultdict(TextDivision)
    async for event in events:
        if not isinstance(event, Piece):
            yield event
        elif config.granularity == "token":
            for one in by_token(event, texts[event.index]):
                yield one
        else:
            yield PieceGroup(event, [] if event.round is None else [event.round])


def by_token(piece: Piece, texts: TextDivision) -> Iterator[PieceGroup]:
    """A piece as one for each token; `texts` divides the text of its answer."""
    for place, (token, (text, _)) in enumerate(zip(piece.tokens, texts.divide(piece.text, piece.tokens), strict=True)):
        rounds = [piece.round] if place == 0 and piece.round is not None else []
        yield PieceGroup(msgspec.structs.replace(piece, text=text, tokens=(token,)), rounds)
    if not piece.tokens:
        yield PieceGroup(piece, [])


async def _by_interval(events: AsyncIterator[Event], interval_s: float) -> AsyncGenerator[Event | PieceGroup]:
    """What came in each interval, on a clock that does not depend on when it came."""
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in events:
                arrived.put_nowait(event)
        finally:
            arrived.put_nowait(None)

    task, loop = asyncio.create_task(pump()), asyncio.get_running_loop()
    due_s, is_open = loop.time() + interval_s, True
    try:
        while is_open:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s = max(due_s + interval_s, loop.time())
            batch: list[Event] = []
            while not arrived.empty():
                event = arrived.get_nowait()
                if event is None:
                    is_open = False
                else:
                    batch.append(event)
            for one in _merged(batch):
                yield one
        await task
    finally:
        await stop(task)


def _merged(events: list[Event]) -> Iterator[Event | PieceGroup]:
    """Pieces of each answer put together; other events stay behind the pieces that came before them."""
    open_groups: dict[int, PieceGroup] = {}
    for event in events:
        if isinstance(event, Piece):
            group = open_groups.get(event.index)
            rounds = [] if event.round is None else [event.round]
            if group is None:
                open_groups[event.index] = PieceGroup(event, rounds)
            else:
                text, tokens = group.piece.text + event.text, group.piece.tokens + event.tokens
                group.piece = msgspec.structs.replace(group.piece, text=text, tokens=tokens)
                group.rounds += rounds
            continue
        yield from open_groups.values()
        open_groups.clear()
        yield event
    yield from open_groups.values()


class Around(NamedTuple):
    """What stands before and behind the JSON of each event."""

    before: bytes
    behind: bytes


SSE = Around(b"data: ", b"\n\n")


def frame(body: object, around: Around = SSE) -> bytes:
    """An event with a JSON body."""
    return b"%b%b%b" % (around.before, msgspec.json.encode(body), around.behind)


def padded_frame(body: dict[str, Any], bucket_bytes: int, around: Around = SSE) -> bytes:
    """An event whose length is a multiple of `bucket_bytes`, filled up in its field `obfuscation`."""
    bare = msgspec.json.encode(body | {"obfuscation": ""})
    missing = -(len(bare) + sum(map(len, around))) % bucket_bytes
    return b'%b%b%b"}%b' % (around.before, bare[:-2], b"0" * missing, around.behind)


class EventStream(Response):
    """A response that sends `frames` as they come. Call `start` before it is returned: what fails before the first
    event is a plain error.
    """

    def __init__(self, exchange: Exchange, frames: AsyncIterator[bytes]) -> None:
        super().__init__()
        self._exchange, self._frames = exchange, frames
        self._config = exchange.api.config
        self._buffer: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed, self._is_full = asyncio.Event(), asyncio.Event()
        self._has_ended = False
        self._error: ApiError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._silence: asyncio.TimerHandle
        self._sent_s, self._is_silent = asyncio.get_running_loop().time(), False  # when something was sent last

    async def start(self, receive: Receive) -> None:
        """Wait for the first event, or until a comment must be sent.

        Raises:
            ApiError: the call failed before its first event, or the client left.
        """
        feeder, watcher = asyncio.create_task(self._feed()), asyncio.create_task(hung_up(receive))
        self._tasks = [feeder, watcher]
        arrival = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({arrival, watcher}, timeout=self._config.ping_s, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():
                self._exchange.leave("client")
                await feeder
                raise self._error or final(CLIENT_GONE, "client_gone", "the client closed the connection")
            if self._error is not None and not self._buffer:
                raise self._error
        except BaseException:
            await self._close()
            raise
        finally:
            await stop(arrival)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        """See ASGI."""
        watcher = self._tasks[1]
        sender, overflow = asyncio.create_task(self._send(send)), asyncio.create_task(self._is_full.wait())
        try:
            await asyncio.wait({sender, watcher, overflow}, return_when=asyncio.FIRST_COMPLETED)
            if overflow.done():  # the socket takes no more: it is closed, since an error could not be sent either
                self._exchange.leave("slow_consumer")
            elif not sender.done() or sender.exception() is not None:  # gone, or the socket broke in mid-sentence
                self._exchange.leave("client")
        finally:
            await stop(sender, overflow)
            await self._close()
            self._finish()

    async def _close(self) -> None:
        """End everything that runs for this response."""
        feeder, watcher = self._tasks
        if not feeder.done():
            self._exchange.leave("client")  # without effect where there is a reason already
            await stop(feeder)
        await stop(watcher)
        await self._exchange.closed()

    def _finish(self) -> None:
        exchange = self._exchange
        if exchange.left:
            is_gone = exchange.left in ("client", "slow_consumer")
            exchange.finish(CLIENT_GONE if is_gone else 200, exchange.left)
        else:
            exchange.finish(200, "" if self._error is None else self._error.code)

    async def _feed(self) -> None:
        try:
            async for data in self._frames:
                self._put(data)
        except ApiError as error:
            self._error = error
        except Exception:  # noqa: BLE001 - a stream must end with an event whatever happens
            _log.exception("request %s: its stream broke down", self._exchange.request_id)
            self._error = final(500, "internal_error", "the server failed to write this answer")
        finally:
            self._has_ended = True
            self._changed.set()

    def _put(self, data: bytes) -> None:
        if self._num_bytes > self._config.stream_buffer_bytes:  # without this event: nobody took what was there
            self._is_full.set()
        self._buffer.append(data)
        self._num_bytes += len(data)
        self._changed.set()

    async def _send(self, send: Send) -> None:
        """Everything that is in the buffer whenever something is, and pings while nothing is."""
        exchange = self._exchange
        wire = wire_of(exchange.path)
        headers = [(b"content-type", wire.media_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._watch_silence()
        try:
            while True:
                self._changed.clear()
                if self._buffer:
                    data = b"".join(self._buffer)
                    self._buffer.clear()
                    self._num_bytes = 0
                elif self._has_ended:
                    break
                elif self._is_silent:
                    data = wire.ping
                else:
                    await self._changed.wait()
                    continue
                self._is_silent = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sent_s = asyncio.get_running_loop().time()
        finally:
            self._silence.cancel()
        last = b"" if self._error is None else error_event(self._error, exchange.path, exchange.request_id)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _watch_silence(self) -> None:
        """Find out when a comment is due, by one timer for each `ping_s` instead of one for each event."""
        loop = asyncio.get_running_loop()
        rest_s = self._sent_s + self._config.ping_s - loop.time()
        if rest_s <= 0:
            self._is_silent, rest_s = True, self._config.ping_s
            self._changed.set()
        self._silence = loop.call_later(rest_s, self._watch_silence)
