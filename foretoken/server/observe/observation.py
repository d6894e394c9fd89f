"""`Observation`: everything that watches one server, put together from an `ObserveConfig`; and the ASGI layer around
everything, which counts each response by route and keeps the trace that the request belongs to.

The layer stands outside the guard, so that refused requests count too. What is refused below ASGI (bytes that are not
HTTP) does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.backend.call import Backend
from foretoken.server.api.errors import CLIENT_GONE
from foretoken.server.api.exchange import Api
from foretoken.server.observe.acceptance import as_values
from foretoken.server.observe.config import LogFormat, ObserveConfig
from foretoken.server.observe.figures import FiguresWriter, RequestFigures
from foretoken.server.observe.history import History
from foretoken.server.observe.metrics import ServerMetrics
from foretoken.server.observe.otel import TRACE_HEADERS, OpenTelemetryMetrics, Tracing, is_wanted
from foretoken.server.record import RequestObserver


class RequestLog(FiguresWriter):
    """A line of every request, on `stream`."""

    def __init__(self, log_format: LogFormat, stream: TextIO | None = None) -> None:
        self._write_line = json_line if log_format == "json" else text_line
        self._stream = sys.stderr if stream is None else stream
        super().__init__("foretoken-request-log")

    def _write(self, batch: Sequence[RequestFigures]) -> int:
        if not batch:
            return 0
        try:
            self._stream.write("".join(f"{self._write_line(figures)}\n" for figures in batch))
            self._stream.flush()
        except (OSError, ValueError):  # a ValueError is a closed stream
            return len(batch)
        return 0


def text_line(figures: RequestFigures) -> str:
    """`time=... id=... route=... status=200 ... tokens=34 ... ttft_s=0.0081 ...`, without what is not known."""
    return " ".join(f"{name}={_shown(value)}" for name, value in _values(figures).items() if value not in (None, ""))


def json_line(figures: RequestFigures) -> str:
    """The same values as one JSON object."""
    return json.dumps(_values(figures))


def _values(figures: RequestFigures) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(figures.began_unix_s)),
        "id": figures.request_id,
        "route": figures.route,
        "status": figures.status,
        "reason": figures.reason,
        "key": figures.key,
        "prompt_tokens": figures.num_prompt_tokens,
        "cached_tokens": figures.num_cached_tokens,
        "tokens": figures.num_completion_tokens,
        "finish": figures.finish_reason,
        "duration_s": _rounded(figures.duration_s),
        "ttft_s": _rounded(figures.ttft_s),
        "tokens_per_s": _rounded(figures.tokens_per_s),
        "drafter": figures.drafter,
        "acceptance": _rounded(figures.acceptance_rate),
        "speedup": _rounded(figures.estimated_speedup),
        "why_plain": figures.why_plain,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_TRACE_NAMES = (b"traceparent", b"tracestate")
_MAX_HEADER_CHARS = 512


class Observation:
    """`observers` and `routers` are for `create_app`; `around` goes around the guard. Close it after the server.

    Raises:
        ConfigError: tracing without its extra.
        StorageError: the history can never be written.
    """

    def __init__(self, backend: Backend, config: ObserveConfig) -> None:
        self.tracing = Tracing() if config.tracing else None
        self.history = (
            None
            if config.history is None
            else History(Path(config.history), config.history_max_age_days, config.history_max_bytes)
        )
        self.log = None if config.request_log == "none" else RequestLog(config.request_log)
        self.metrics = ServerMetrics(backend, config, self.history, self.log)
        self.sent_metrics = OpenTelemetryMetrics(self.metrics) if config.tracing and is_wanted() else None

    @property
    def observers(self) -> tuple[RequestObserver, ...]:
        """Takers of finished requests."""
        return tuple(one for one in (self.metrics, self.tracing, self.history, self.log) if one is not None)

    @property
    def routers(self) -> tuple[Callable[[Api], APIRouter], APIRouter]:
        """The routes `/metrics`, where the API has it, and `/v1/acceptance`."""
        return (partial(metrics_router, self.metrics), acceptance_router(self.history))

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app` with its responses counted and its trace context kept."""
        return counted(app, self.metrics)

    def close(self) -> None:
        """Write and send what is left."""
        for one in (self.tracing, self.sent_metrics, self.history, self.log):
            if one is not None:
                one.close()


def metrics_router(metrics: ServerMetrics, api: Api) -> APIRouter:
    """A router with `/metrics`, in Prometheus' text format, unless it is closed (`ApiConfig.metrics`)."""
    router = APIRouter()
    if not api.config.metrics:
        return router

    @router.get("/metrics", include_in_schema=False)
    async def show() -> Response:
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def acceptance_router(history: History | None) -> APIRouter:
    """A router with acceptance by day, for the page; without a history it has no series."""
    router = APIRouter()

    @router.get("/v1/acceptance")
    async def acceptance() -> dict[str, Any]:
        """Each model, drafter and slice with its last whole days, and whether its acceptance has fallen."""
        series = () if history is None else history.series
        return {"has_history": history is not None, "series": [as_values(one, series) for one in series]}

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
