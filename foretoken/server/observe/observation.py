"""`Observation`: everything that watches one server, put together from an `ObserveConfig`; and the ASGI layer around
everything, which counts each response by route and keeps the trace that the request belongs to.

The layer stands outside the guard, so that refused requests count too. What is refused below ASGI (bytes that are not
HTTP) does not.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.backend.call import Backend
from foretoken.server.api.errors import CLIENT_GONE
from foretoken.server.observe.config import ObserveConfig
from foretoken.server.observe.history import History
from foretoken.server.observe.metrics import ServerMetrics
from foretoken.server.observe.otel import TRACE_HEADERS, OpenTelemetryMetrics, OpenTelemetrySink, Tracing, is_wanted
from foretoken.server.observe.request_log import RequestLog
from foretoken.server.record import RequestObserver

_TRACE_NAMES = (b"traceparent", b"tracestate")
_MAX_HEADER_CHARS = 512


class Observation:
    """`observers` and `routers` are for `create_app`; `around` goes around the guard. Close it after the server.

    Raises:
        ConfigError: tracing without its extra.
        StorageError: the history can never be written.
    """

    def __init__(self, backend: Backend, config: ObserveConfig) -> None:
        self.metrics = ServerMetrics(backend, config)
        self.tracing = Tracing(OpenTelemetrySink()) if config.tracing else None
        self.sent_metrics = OpenTelemetryMetrics(self.metrics) if config.tracing and is_wanted() else None
        self.history = (
            None
            if config.history is None
            else History(Path(config.history), config.history_max_age_days, config.history_max_bytes)
        )
        self.log = None if config.request_log == "none" else RequestLog(config.request_log)
        if self.history is not None:
            history = self.history
            self.metrics.watch_dropped("history_dropped_rows", lambda: history.num_dropped)
        if self.log is not None:
            log = self.log
            self.metrics.watch_dropped("request_log_dropped_lines", lambda: log.num_dropped)

    @property
    def observers(self) -> tuple[RequestObserver, ...]:
        """Takers of finished requests."""
        return tuple(one for one in (self.metrics, self.tracing, self.history, self.log) if one is not None)

    @property
    def routers(self) -> tuple[APIRouter, ...]:
        """The route `/metrics`."""
        return (metrics_router(self.metrics),)

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app` with its responses counted and its trace context kept."""
        return counted(app, self.metrics)

    def close(self) -> None:
        """Write and send what is left."""
        for one in (self.tracing, self.sent_metrics, self.history, self.log):
            if one is not None:
                one.close()


def metrics_router(metrics: ServerMetrics) -> APIRouter:
    """A router with `/metrics`, in Prometheus' text format."""
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    async def show() -> Response:
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def counted(app: ASGIApp, metrics: ServerMetrics) -> ASGIApp:
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
                metrics.count_response(route_of(scope), scope["method"], CLIENT_GONE)

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
