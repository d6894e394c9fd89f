"""`RayOptions`: how many replicas `foretoken serve --ray` runs, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from foretoken.control.autoscaling import AIM_SHARE, DOWN_SHARE
from foretoken.errors import ConfigError
from foretoken.option import Settings
from foretoken.params import check_flag, check_number, check_whole
from foretoken.server.config import ServerConfig

QUEUED_TOKENS, BATCHES = "queued_tokens", "batches"  # what a replica reports to the autoscaler
_OTHERS = 256  # calls of a replica beside its requests: cancellations, texts to tokenise, statistics
_QUIET = {"enable_access_log": False}  # the request log of the front has every request
_MOST = 86_400.0  # cores, GPUs or seconds: a day
_setting = Settings("Ray")


@dataclass(frozen=True)
class RayOptions:
    """Replicas beside those of `LifeConfig`, whose `workers` is the smallest number of them. Times in seconds.

    - `max_replicas`: None keeps their number at `workers`.
    - `replica_tokens`: tokens that the requests of one replica may still read and write, on which scaling aims; None:
      on four fifths of a full batch of requests.
    - `replica_cpus`, `replica_gpus`: what Ray reserves for each, of a tensor-parallel replica for each of its ranks.
    """

    ray: bool = _setting(False, "Run the workers as replicas of Ray Serve, in the cluster of RAY_ADDRESS or a new one.")
    max_replicas: int | None = _setting(None, "Most replicas; without it, the number is always --workers.")
    replica_tokens: int | None = _setting(
        None,
        "Tokens that the requests of a replica may still read and write; more add replicas. "
        "Without it, four fifths of --max-batch-size requests.",
    )
    replica_cpus: float = _setting(
        1.0, "CPUs that Ray reserves for a replica, or for each of its ranks, and its threads."
    )
    replica_gpus: float = _setting(0.0, "GPUs that Ray reserves for a replica, or for each of its ranks.")
    scale_up_s: float = _setting(10.0, "Seconds of too many queued tokens before a replica is added.")
    scale_down_s: float = _setting(300.0, "Seconds of few queued tokens before a replica is drained.")

    def __post_init__(self) -> None:
        check_flag("ray", self.ray)
        for name in ("replica_tokens", "max_replicas"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low=1)
        check_number("replica_cpus", self.replica_cpus, low=0.0, high=_MOST, open_low=True)
        for name in ("replica_gpus", "scale_up_s", "scale_down_s"):
            check_number(name, getattr(self, name), low=0.0, high=_MOST)

    def check_with(self, config: ServerConfig) -> None:
        """Refuse what these replicas cannot do.

        Raises:
            ConfigError: names the field.
        """
        workers = config.life.workers
        if self.max_replicas is not None and self.max_replicas < workers:
            raise ConfigError("max_replicas", self.max_replicas, f"must be at least workers, which is {workers}")
        refused = {
            "devices": (config.life.devices, "Ray gives a replica its GPUs: use --replica-gpus"),
            "trace": (config.engine.trace, "replicas may run on any machine: record with `foretoken serve` on one"),
        }
        for name, (value, remedy) in refused.items():
            if value:
                raise ConfigError(name, str(value), f"is not offered with --ray; {remedy}")


def engine_options(config: ServerConfig, options: RayOptions) -> dict[str, Any]:
    """How Ray Serve runs the engine's replicas, under its names."""
    workers = config.life.workers
    scaling = {
        "min_replicas": workers,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.scale_up_s,
        "downscale_delay_s": options.scale_down_s,
        "downscaling_factor": DOWN_SHARE,
        "look_back_period_s": min(10.0, max(1.0, options.scale_up_s)),
        "metrics_interval_s": 1.0,
        "policy": _policy(config, options),
    }
    number = {"num_replicas": workers} if options.max_replicas is None else {"autoscaling_config": scaling}
    return {
        **number,
        "max_ongoing_requests": _calls(config),
        "graceful_shutdown_timeout_s": config.life.drain_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "logging_config": _QUIET,
        "ray_actor_options": {
            "num_cpus": options.replica_cpus * config.engine.tensor_parallel,
            "num_gpus": options.replica_gpus * config.engine.tensor_parallel,
        },
        "request_router_config": {"request_router_class": "foretoken.scale.router:ConversationRouter"},
    }


def _calls(config: ServerConfig) -> int:
    """Calls of a replica at the same time. Requests beyond those that run or wait the engine refuses by itself."""
    return config.engine.max_batch_size + config.life.max_waiting + _OTHERS


def _policy(config: ServerConfig, options: RayOptions) -> dict[str, Any]:
    """Ray's name and arguments of what decides how many replicas there are."""
    given: dict[str, Any] = {"metric": BATCHES, "aim": AIM_SHARE, "usual": 1 / config.engine.max_batch_size}
    if options.replica_tokens is not None:
        given = {"metric": QUEUED_TOKENS, "aim": options.replica_tokens, "usual": options.replica_tokens}
    return {"policy_function": "foretoken.scale.decide:ReplicaLoad", "policy_kwargs": given}


def front_options(config: ServerConfig, options: RayOptions) -> dict[str, Any]:
    """The same for fronts: one, for which no core is reserved; a Serve config may ask for more."""
    replicas = options.max_replicas or config.life.workers
    return {
        "num_replicas": 1,
        "max_ongoing_requests": 2 * replicas * _calls(config),
        "graceful_shutdown_timeout_s": config.life.drain_s,
        "logging_config": _QUIET,
        "ray_actor_options": {"num_cpus": 0},
    }
