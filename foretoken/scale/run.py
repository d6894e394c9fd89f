"""`run_on_ray`: `foretoken serve --ray`, from its configuration to an orderly end."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from foretoken.backend.call import ModelInfo
from foretoken.errors import EngineError
from foretoken.scale.options import RayOptions
from foretoken.server.config import ServerConfig
from foretoken.server.run import EXIT_CODES, Readiness, listening_socket

APP = "foretoken"
_DEFAULTS = {  # read when Ray is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Serve's 5 s are too short where loading takes all cores
}
_STORE_BYTES = 256 << 20  # of the objects that a local cluster shares: messages pass without it


def run_on_ray(config: ServerConfig, options: RayOptions, on_ready: Callable[[Readiness], None]) -> int:
    """Serve until a signal; the exit code. Joins the cluster of RAY_ADDRESS, or starts one on this machine.

    Raises:
        ConfigError: the start is refused.
        StorageError: the port is in use.
        EngineError: no replica could be started.
    """
    config.check_start()
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    from foretoken.scale.deploy import ENGINE, application

    built = application(config, options)
    is_ours = not os.environ.get("RAY_ADDRESS")
    host, port = config.guard.host, config.port
    if is_ours:
        with listening_socket(host, port) as listener:  # free now; then Ray's proxy listens there
            host, port = listener.getsockname()[:2]
    cpus = (options.max_replicas or config.life.workers) * options.replica_cpus
    local = {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "num_cpus": max(math.ceil(cpus), os.cpu_count() or 1),
    }
    began_s = time.perf_counter()
    ray.init(**(local if is_ours else {}), logging_level="warning")
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(built, name=APP, route_prefix="/")
        except RuntimeError as error:
            raise EngineError(f"the replicas could not be started: {error}") from error
        found = _get_global_client().http_config  # of a Serve that was running before, its own
        url = f"http://{f'[{found.host}]' if ':' in found.host else found.host}:{found.port}"
        info = _info_of(serve.get_deployment_handle(ENGINE, APP))
        took_s = time.perf_counter() - began_s
        on_ready(Readiness(url, info, tuple(sorted(info.default_spec.leaves)), took_s, config.life.workers))
        number = _wait_for_signal()
        serve.delete(APP)  # returns after the drain
    finally:
        if is_ours:
            serve.shutdown()
        ray.shutdown()
    return EXIT_CODES.get(number, 0)


def _wait_for_signal() -> int:
    """The first signal that ends a server. A later one does what it did before."""
    found: list[int] = []
    arrived = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def on_signal(number: int, _frame: object) -> None:
        found.append(number)
        arrived.set()

    for one in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        before[one] = signal.signal(one, on_signal)
    arrived.wait()
    for one, handler in before.items():
        signal.signal(one, handler)
    return found[0]


def _info_of(handle: Any) -> ModelInfo:  # noqa: ANN401 - ray.serve's DeploymentHandle
    return msgspec.msgpack.decode(handle.info.remote().result(), type=ModelInfo)
