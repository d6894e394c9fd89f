"""The application that Ray Serve runs: fronts, which speak HTTP, before replicas of the engine."""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.types import ASGIApp

from foretoken.machine.threads import sleeping
from foretoken.scale.backend import RayBackend
from foretoken.scale.options import RayOptions
from foretoken.scale.replica import EngineReplica
from foretoken.server.config import ServerConfig
from foretoken.server.run import compose

ENGINE, FRONT = "Engine", "Front"
_RUNNING = 256  # requests of one step, at most; those beyond `max_waiting` the engine refuses by itself
_FRONT_CPUS = 0.1


class Front:
    """One HTTP front: the routes, keys and limits of `foretoken serve`."""

    def __init__(self, engine: Any, config: ServerConfig) -> None:  # noqa: ANN401 - ray.serve's DeploymentHandle
        self._engine, self._config = engine, config

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook, called in the event loop of the replica."""
        self._composed = compose(RayBackend(self._engine, self._config), self._config)
        return self._composed.app

    def __del__(self) -> None:
        """Write what is left of logs and history."""
        if hasattr(self, "_composed"):
            self._composed.close()


def application(config: ServerConfig, options: RayOptions) -> Any:  # noqa: ANN401 - ray.serve's Application
    """The application, for `serve.run`.

    Raises:
        ConfigError: a setting that replicas cannot honour.
    """
    options.check_with(config)
    engine = serve.deployment(EngineReplica, name=ENGINE, **engine_options(config, options))
    front = serve.deployment(serve.ingress()(Front), name=FRONT, **front_options(config, options))
    return front.bind(engine.bind(config), config)


def engine_options(config: ServerConfig, options: RayOptions) -> dict[str, Any]:
    """How Ray Serve runs the engine's replicas, under its names."""
    workers = config.life.workers
    policy = {
        "policy_function": "foretoken.scale.decide:QueuedTokens",
        "policy_kwargs": {"replica_tokens": options.replica_tokens},
    }
    scaling = {
        "min_replicas": workers,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.scale_up_s,
        "downscale_delay_s": options.scale_down_s,
        "look_back_period_s": min(10.0, max(1.0, options.scale_up_s)),
        "metrics_interval_s": 1.0,
        "policy": policy,
    }
    number = {"num_replicas": workers} if options.max_replicas is None else {"autoscaling_config": scaling}
    return {
        **number,
        "max_ongoing_requests": config.life.max_waiting + _RUNNING,
        "graceful_shutdown_timeout_s": config.life.drain_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "ray_actor_options": {
            "num_cpus": options.replica_cpus,
            "num_gpus": options.replica_gpus,
            "runtime_env": {"env_vars": sleeping()},
        },
        "request_router_config": {"request_router_class": "foretoken.scale.router:ConversationRouter"},
    }


def front_options(config: ServerConfig, options: RayOptions) -> dict[str, Any]:
    """The same for fronts: one, whose share of a core is reserved; a Serve config may ask for more."""
    replicas = options.max_replicas or config.life.workers
    return {
        "num_replicas": 1,
        "max_ongoing_requests": 2 * replicas * (config.life.max_waiting + _RUNNING),
        "graceful_shutdown_timeout_s": config.life.drain_s,
        "ray_actor_options": {"num_cpus": _FRONT_CPUS},
    }
