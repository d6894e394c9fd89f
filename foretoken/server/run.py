"""`run_server`: the HTTP server in front of its workers, from its configuration to an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import APIRouter
from starlette.types import ASGIApp

from foretoken.backend.call import Backend, ModelInfo
from foretoken.errors import ConfigError, ForetokenError, StorageError
from foretoken.server.api.app import RouterMaker, create_app
from foretoken.server.config import ServerConfig
from foretoken.server.guard.app import Guard
from foretoken.server.guard.connection import uvicorn_options
from foretoken.server.life.replicas import AsyncCondition, Replicas
from foretoken.server.observe.observation import Observation
from foretoken.server.page.page import page_router, stats_router

_TEST_VARIABLE = "FORETOKEN_TEST"  # "1": what the front and its workers hold can be asked for
_BACKLOG = 2048  # connections that wait to be accepted; the kernel's own limit cuts it
_log = logging.getLogger("foretoken.server")

INTERRUPTED = 130
EXIT_CODES: dict[int, int] = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: 129,
}  # after a drain; SIGTERM is an orderly end
_LAST_BYTES_S = 5  # for responses that have ended to reach their clients, after the drain


@dataclass(frozen=True)
class Readiness:
    """What is known when the first worker is ready."""

    url: str
    info: ModelInfo
    drafters: tuple[str, ...]
    load_s: float
    num_workers: int


class ServedBackend(Backend, Protocol):
    """A backend with a life: started in the event loop, drained and closed before it ends."""

    changes: AsyncCondition  # of `state` and `failure`

    def start(self) -> None:
        """Begin to load."""

    def described(self) -> tuple[ModelInfo, tuple[str, ...], float, int]:
        """Of a backend that is ready: model, drafters, seconds of loading, number of engines."""

    @property
    def failure(self) -> ForetokenError | None:
        """Why it will never be ready again; None while it may."""

    @property
    def num_open(self) -> int:
        """Calls in flight."""

    async def drain(self, drain_s: float) -> bool:
        """Take no more calls, and wait for those in flight; whether all ended within `drain_s`."""

    async def close(self) -> None:
        """End what was started."""

    def kill_now(self) -> None:
        """The same without waiting, for a process that ends itself."""


def run_server(
    config: ServerConfig, on_ready: Callable[[Readiness], None], backend: ServedBackend | None = None
) -> int:
    """Serve until a signal; the exit code. `on_ready` is called once, from the event loop. Without a `backend` those of
    `config.life` are started.

    SIGTERM, SIGHUP and a first SIGINT drain: no new requests, those in flight may end within `config.life.drain_s`. A
    second SIGINT ends the process at once.

    Raises:
        ConfigError: the start is refused.
        StorageError: the port is in use; a file cannot be read.
        ForetokenError: no worker could be started.
    """
    config.check_start()
    listener = listening_socket(config.guard.host, config.port)
    try:
        with _logging_to_stderr():
            if _is_test_build():
                _log.warning("TEST BUILD (%s=1): /debug/invariants is open, do not serve users with it", _TEST_VARIABLE)
            backend = backend or Replicas(config.engine, config.model_name, config.life, config.draft_required)
            return asyncio.run(_Front(config, backend, listener, on_ready).run())
    finally:
        listener.close()


class _Front:
    def __init__(
        self,
        config: ServerConfig,
        backend: ServedBackend,
        listener: socket.socket,
        on_ready: Callable[[Readiness], None],
    ) -> None:
        self._config, self._backend, self._listener, self._on_ready = config, backend, listener, on_ready
        self._signals: list[int] = []
        self._url = url_of(listener, config.tls_cert is not None)

    async def run(self) -> int:
        backend, changes = self._backend, self._backend.changes
        composed = compose(backend, self._config)
        server = _HttpServer(_uvicorn_config(composed, self._config), self._on_signal)
        self._loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)
        backend.start()
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        serving.add_done_callback(lambda _task: changes.notify_all())
        reporting = asyncio.create_task(self._report_ready())
        try:
            await changes.wait_for(lambda: bool(self._signals) or backend.failure is not None or serving.done())
            if self._signals:
                await self._drain()
        finally:
            reporting.cancel()
            server.should_exit = True
            await serving
            await backend.close()
            composed.close()
        if backend.failure is not None:
            raise backend.failure
        return next((EXIT_CODES[number] for number in self._signals if number in EXIT_CODES), 0)

    async def _report_ready(self) -> None:
        backend = self._backend
        await backend.changes.wait_for(lambda: backend.state == "ready")
        self._on_ready(Readiness(self._url, *backend.described()))

    async def _drain(self) -> None:
        drain_s = self._config.life.drain_s
        num_open = self._backend.num_open
        name = signal.Signals(self._signals[0]).name
        _log.info("%s: draining, %d requests in flight, at most %g s", name, num_open, drain_s)
        if not await self._backend.drain(drain_s):
            _log.warning("requests were still in flight after %g s: they ended with an error", drain_s)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and signal.SIGINT in self._signals:
            self._backend.kill_now()
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        self._signals.append(number)
        self._loop.call_soon_threadsafe(self._backend.changes.notify_all)


class _HttpServer(uvicorn.Server):
    """uvicorn with the signals left to us: its own way would close the listener before the drain."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler
        self._on_signal(sig)


def _uvicorn_config(composed: Composed, config: ServerConfig) -> uvicorn.Config:
    options: dict[str, Any] = {
        "lifespan": "off",
        "log_config": None,
        "access_log": False,  # the request log has it
        "timeout_graceful_shutdown": _LAST_BYTES_S,
        "ssl_certfile": config.tls_cert,
        "ssl_keyfile": config.tls_key,
    }
    return uvicorn.Config(composed.app, **options, **composed.uvicorn_options)


@contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Lines with a time for the server's own messages, and for warnings of uvicorn."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    levels = {_log: logging.INFO, logging.getLogger("uvicorn.error"): logging.WARNING}
    for logger, level in levels.items():
        logger.addHandler(handler)
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger in levels:
            logger.removeHandler(handler)


@dataclass(frozen=True)
class Composed:
    """`app` is served with `uvicorn_options`; `close` is called after the server."""

    app: ASGIApp
    uvicorn_options: dict[str, Any]
    close: Callable[[], None]


def _is_test_build() -> bool:
    return os.environ.get(_TEST_VARIABLE) == "1"


def compose(backend: Backend, config: ServerConfig) -> Composed:
    """Everything over a backend.

    Raises:
        ConfigError, StorageError: keys, history or tracing that cannot be used.
    """
    observation = Observation(backend, config.observe)
    routers: list[APIRouter | RouterMaker] = [*observation.routers, page_router(), stats_router]
    if _is_test_build() and isinstance(backend, Replicas):
        router = APIRouter()
        router.add_api_route("/debug/invariants", backend.invariants, methods=["GET"], include_in_schema=False)
        routers.append(router)
    app = create_app(backend, config.api, observation.observers, routers)
    return Composed(observation.around(Guard(app, config.guard)), uvicorn_options(config.guard), observation.close)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address of this machine.

    Raises:
        ConfigError: no such address; StorageError: the port is in use, or needs other rights.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError("host", host, "is no address of this machine") from error
    # With its protocol, unlike `socket.create_server`: asyncio sets TCP_NODELAY where it knows the protocol only.
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", host, "is no address of this machine") from error
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is in use: stop the other program, or give another --port"
            raise StorageError(message) from error
        raise StorageError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    found.setblocking(False)
    return found


def url_of(listener: socket.socket, is_tls: bool) -> str:
    """The address of the server as clients write it."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
