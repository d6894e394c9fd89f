"""Connections below ASGI: a time for the headers of a request, a limit on connections, h11 with a bounded buffer.

An application is called when the headers are there, so a client that sends them slowly must be stopped in the
protocol. uvicorn's parser based on httptools has no limit for headers: h11 is always used here.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.server.api.errors import ApiError
from foretoken.server.guard.app import raw
from foretoken.server.guard.config import GuardConfig
from foretoken.server.receiving import SharedBufferProtocol

_NO_LINE = re.compile(rb"[^\s!#$%&'*+\-.^_`|~0-9A-Za-z]")  # begins no chunk size and no name of a header

# Each chunk of a body takes some 20 microseconds of the event loop, however small: 64 KiB read at once may hold 10,000.
_FREE_CHUNKS = 1024
_MIN_CHUNK_BYTES = 16  # on average, of a body of more


def uvicorn_options(config: GuardConfig) -> dict[str, Any]:
    """Keywords for `uvicorn.Config` that put the limits of `config` in force."""

    class Limited(GuardedProtocol):
        guard = config

    return {
        "http": Limited,
        "ws": "none",
        "h11_max_incomplete_event_size": config.max_header_bytes,
        "timeout_keep_alive": config.keep_alive_s,
        "server_header": False,
        "proxy_headers": False,  # they would let a client choose its address
    }


class _Parser(h11.Connection):
    """h11 that takes a body of many tiny chunks for a malformed one."""

    _num_chunks = _num_bytes = 0  # of the body that is read

    def next_event(self) -> Any:  # noqa: ANN401 - h11's events and marks
        """See h11."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > _FREE_CHUNKS and self._num_bytes < self._num_chunks * _MIN_CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        return event


class GuardedProtocol(H11Protocol, SharedBufferProtocol):
    """One connection."""

    guard: GuardConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(*arguments, **options)
        self.conn = _Parser(h11.SERVER, self.guard.max_header_bytes)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a connection, in place of an idle one where there are too many; or answer that there are."""
        super().connection_made(transport)
        if len(self.connections) > self.guard.max_connections and not self._end_idlest():
            message = "too many connections: come again later"
            self._close_with(ApiError(503, "rate_limited", message, headers={"retry-after": "1"}))
            return
        self._watch_headers()  # a client that sends nothing is a slow one

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._unwatch_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; the first ones of a request start its time."""
        if self._header_timer is None and self._awaits_headers:
            self._watch_headers()
        kept = self.timeout_keep_alive_task if self._is_leftover else None
        if kept is not None:  # the rest of a body that nobody reads does not keep the connection open
            self.timeout_keep_alive_task = None
        super().data_received(data)
        if kept is not None:
            if self._is_leftover and self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = kept
            else:
                kept.cancel()

    def handle_events(self) -> None:
        """Read what has come; headers that are complete stop the time, a malformed body ends the request."""
        super().handle_events()
        if not self._awaits_headers:
            self._unwatch_headers()
        if self._is_body_malformed:
            self.logger.warning("Invalid chunk of a body.")
            self.send_400_response("Invalid chunk of a body.")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text
        """What is not HTTP, or has headers that are too large, in the envelope of all errors."""
        self._close_with(ApiError(400, "invalid_value", "these bytes are no HTTP request that can be read"))

    def _end_idlest(self) -> bool:
        """Close the connection that has waited longest for its next request; False where none does."""
        waiting: list[tuple[float, GuardedProtocol]] = [
            (one.timeout_keep_alive_task.when(), one)
            for one in self.connections
            if isinstance(one, GuardedProtocol) and one.timeout_keep_alive_task and not one.transport.is_closing()
        ]
        if not waiting:
            return False
        idlest = min(waiting, key=lambda pair: pair[0])[1]
        idlest.timeout_keep_alive_handler()
        return True

    @property
    def _awaits_headers(self) -> bool:
        return self.conn.their_state is h11.IDLE

    @property
    def _is_body_malformed(self) -> bool:
        """Whether what h11 could not read yet of a body in chunks can become neither the size of a chunk nor a trailer.

        h11 looks at a line when its end has come, which a body that is not in chunks may never have.
        """
        if self.conn.their_state is not h11.SEND_BODY:
            return False  # a connection whose first bytes are no request has no headers to look at
        has_chunks = any(name == b"transfer-encoding" for name, _ in self.headers)
        return has_chunks and _NO_LINE.match(self.conn.trailing_data[0]) is not None

    @property
    def _is_leftover(self) -> bool:
        """Whether a body still comes in whose request was answered."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete

    def _watch_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.guard.header_timeout_s, self._on_header_timeout)

    def _unwatch_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        self.transport.close()

    def _close_with(self, error: ApiError) -> None:
        """Answer, where nothing was answered yet, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers, body = raw(error, secrets.token_hex(12))
            answer = h11.Response(status_code=error.status_code, headers=[*headers, (b"connection", b"close")])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
