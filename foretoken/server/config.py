"""`ServerConfig`: everything that `foretoken serve` is started with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.option import Settings
from foretoken.params import check_flag, check_text, check_whole
from foretoken.server.api.config import ApiConfig
from foretoken.server.guard.config import GuardConfig
from foretoken.server.guard.keys import key_ring, refuse_public_bind
from foretoken.server.life.config import LifeConfig
from foretoken.server.observe.config import ObserveConfig

_setting = Settings()


@dataclass(frozen=True)
class ServerConfig:
    """What every worker builds its `engine` from, and the address: `guard.host` and `port`. Without `draft_required` a
    server whose draft is missing or broken warns and does without.
    """

    engine: EngineConfig
    name: str | None = _setting(None, "Name of the model for clients; without it, the model's own name.")
    port: int = _setting(8000, "The port to listen on; 0 = a free one.")
    draft_required: bool = _setting(False, "End with an error if the draft model is missing or broken.")
    tls_cert: str | None = _setting(None, "Certificate for HTTPS, a PEM file.")
    tls_key: str | None = _setting(None, "Its key, a PEM file.")
    api: ApiConfig = field(default_factory=ApiConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    life: LifeConfig = field(default_factory=LifeConfig)

    def __post_init__(self) -> None:
        check_whole("port", self.port, low=0, high=65_535)
        check_flag("draft_required", self.draft_required)
        if self.name is not None:
            check_text("name", self.name)
            if not self.name:
                raise ConfigError("name", self.name, "must not be empty")
        if self.engine.trace is not None and self.life.workers > 1:
            raise ConfigError("trace", str(self.engine.trace), "is written by one worker: give --workers 1")
        for one, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise ConfigError(other, None, f"{one} is given: both are needed")

    @property
    def model_name(self) -> str:
        """What clients call the model: the last part of its folder's or its hub id's name."""
        return self.name or Path(str(self.engine.model)).name

    def check_start(self) -> None:
        """Refuse what the files and the network make impossible, before anything is loaded.

        Raises:
            ConfigError: a public address without a key, malformed keys, TLS files that cannot be used.
            StorageError: the file of keys cannot be read.
        """
        refuse_public_bind(self.guard.host, key_ring(self.guard), self.guard.insecure)
        if self.tls_cert is not None and self.tls_key is not None:
            _check_tls(self.tls_cert, self.tls_key)


def _check_tls(cert: str, key: str) -> None:
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(name, path, f"cannot be read: {error.strerror}") from error
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        remedy = "is not the key of tls_cert, or one of them is no PEM file, or the key has a password"
        raise ConfigError("tls_key", key, remedy) from error
