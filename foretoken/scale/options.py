"""`RayOptions`: how many replicas `foretoken serve --ray` runs, and on what."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from foretoken.errors import ConfigError
from foretoken.option import option
from foretoken.params import check_flag, check_number, check_whole
from foretoken.server.config import ServerConfig

_option = partial(option, group="Ray")


@dataclass(frozen=True)
class RayOptions:
    """Replicas beside those of `LifeConfig`, whose `workers` is the smallest number of them. Times in seconds.

    - `max_replicas`: None keeps their number at `workers`.
    - `replica_tokens`: tokens that the requests of one replica may still read and write, on which scaling aims.
    - `replica_cpus`, `replica_gpus`: what Ray reserves for each.

    Raises:
        ConfigError, InputError: a value that cannot be honoured; names the field.
    """

    ray: bool = field(
        default=False,
        metadata=_option("Run the workers as replicas of Ray Serve, on the cluster of RAY_ADDRESS or one started here."),
    )
    max_replicas: int | None = field(
        default=None, metadata=_option("Most replicas; without it, always as many as --workers.")
    )
    replica_tokens: int = field(
        default=16_384,
        metadata=_option("Tokens that the requests of a replica may still read and write; more add replicas."),
    )
    replica_cpus: float = field(default=1.0, metadata=_option("CPUs that Ray reserves for a replica, and its threads."))
    replica_gpus: float = field(default=0.0, metadata=_option("GPUs that Ray reserves for a replica."))
    scale_up_s: float = field(
        default=10.0, metadata=_option("Seconds of too many queued tokens before a replica is added.")
    )
    scale_down_s: float = field(
        default=300.0, metadata=_option("Seconds of few queued tokens before a replica is drained.")
    )

    def __post_init__(self) -> None:
        check_flag("ray", self.ray)
        check_whole("replica_tokens", self.replica_tokens, low=1)
        if self.max_replicas is not None:
            check_whole("max_replicas", self.max_replicas, low=1)
        check_number("replica_cpus", self.replica_cpus, low=0.0, open_low=True)
        for name in ("replica_gpus", "scale_up_s", "scale_down_s"):
            check_number(name, getattr(self, name), low=0.0)

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
            "tls_cert": (config.tls_cert, "Ray's proxy speaks plain HTTP: end TLS at a load balancer before it"),
            "trace": (config.engine.trace, "replicas may run on any machine: record with `foretoken serve` on one"),
        }
        for name, (value, remedy) in refused.items():
            if value:
                raise ConfigError(name, str(value), f"is not offered with --ray; {remedy}")
