"""`run_on_ray`: `foretoken serve --ray`, whose front is this process and whose workers are replicas of Ray Serve."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from foretoken.errors import EngineError
from foretoken.scale.options import RayOptions
from foretoken.server.config import ServerConfig
from foretoken.server.run import Readiness, listening_socket, run_server

APP = "foretoken"
_STORE_BYTES = 256 << 20  # of the objects that a local cluster shares: messages pass without it


def run_on_ray(config: ServerConfig, options: RayOptions, on_ready: Callable[[Readiness], None]) -> int:
    """Serve until a signal; the exit code, see `run_server`. Joins the cluster of RAY_ADDRESS, or starts one here.

    Raises:
        ConfigError, StorageError: see `run_server`; EngineError: no replica could be started.
    """
    options.check_with(config)
    config.check_start()
    listening_socket(config.guard.host, config.port).close()  # refused before minutes of loading
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray is imported
    import ray
    from ray import serve

    from foretoken.scale.backend import RayBackend
    from foretoken.scale.deploy import engines

    is_ours = not os.environ.get("RAY_ADDRESS")
    if is_ours:  # Ray's own is 15: beside anything else that computes, a replica would get next to no time
        os.environ.setdefault("RAY_worker_niceness", "0")
    cpus = (options.max_replicas or config.life.workers) * options.replica_cpus * config.engine.tensor_parallel
    local = {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": _STORE_BYTES,
        "num_cpus": max(math.ceil(cpus), os.cpu_count() or 1),
    }
    began_s = time.perf_counter()
    ray.init(**(local if is_ours else {}), logging_level="warning")
    try:
        if is_ours:
            serve.start(http_options={"location": "NoServer"})
        try:
            handle = serve.run(engines(config, options), name=APP, route_prefix=None)
        except RuntimeError as error:
            raise EngineError(f"the replicas could not be started: {error}") from error
        return run_server(config, on_ready, RayBackend(handle, config, time.perf_counter() - began_s))
    finally:
        if is_ours:
            serve.shutdown()
        else:
            serve.delete(APP)
        ray.shutdown()
