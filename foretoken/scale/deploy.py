"""The application that Ray Serve runs: fronts, which speak HTTP, before replicas of the engine."""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.types import ASGIApp

from foretoken.scale.backend import RayBackend
from foretoken.scale.options import RayOptions, engine_options, front_options
from foretoken.scale.replica import EngineReplica
from foretoken.server.config import ServerConfig
from foretoken.server.run import compose


class Front:
    """One HTTP front: the routes, keys and limits of `foretoken serve`."""

    def __init__(self, engine: Any, config: ServerConfig) -> None:  # noqa: ANN401 - ray.serve's DeploymentHandle
        self._engine, self._config = engine, config

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook, called in the event loop of the replica."""
        backend = RayBackend(self._engine, self._config)
        backend.start()
        self._composed = compose(backend, self._config)
        return self._composed.app

    def __del__(self) -> None:
        """Write what is left of logs and history."""
        if hasattr(self, "_composed"):
            self._composed.close()


def application(config: ServerConfig, options: RayOptions) -> Any:  # noqa: ANN401 - ray.serve's Application
    """The application of fronts and replicas, for a Serve config."""
    front = serve.deployment(serve.ingress()(Front), name="Front", **front_options(config, options))
    return front.bind(engines(config, options), config)


def engines(config: ServerConfig, options: RayOptions) -> Any:  # noqa: ANN401 - ray.serve's Application
    """The replicas alone, for a front elsewhere."""
    return serve.deployment(EngineReplica, name="Engine", **engine_options(config, options)).bind(config)
