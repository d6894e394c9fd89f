"""An ASGI layer around everything: counts each response by route, and keeps the trace that the request belongs to.

It stands outside the guard, so that refused requests count too. What is refused below ASGI (bytes that are not HTTP)
does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from foretoken.server.observe.metrics import ServerMetrics

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The W3C trace context of the request that this task, or the one that started it, answers.
TRACE_HEADERS: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)
_TRACE_NAMES = (b"traceparent", b"tracestate")
_MAX_HEADER_CHARS = 512
_CLIENT_LEFT = 499


def counted(app: App, metrics: ServerMetrics) -> App:
    """`app` with its responses counted."""

    async def layer(scope: Scope, receive: Receive, send: Send) -> None:
        metrics.watch_loop()
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        codes: list[int] = []

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and not codes:
                codes.append(message["status"])
                metrics.count_response(route_of(scope), scope["method"], message["status"])
            await send(message)

        token = TRACE_HEADERS.set(_trace_headers(scope))
        try:
            await app(scope, receive, send_counted)
        finally:
            TRACE_HEADERS.reset(token)
            if not codes:
                metrics.count_response(route_of(scope), scope["method"], _CLIENT_LEFT)

    return layer


def route_of(scope: Scope) -> str:
    """The template of the route that took the request, "other" if none did: a path would be the client's text."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "other"


def _trace_headers(scope: Scope) -> dict[str, str] | None:
    found = {
        name.decode("ascii"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in _TRACE_NAMES and len(value) <= _MAX_HEADER_CHARS
    }
    return found or None
