"""`GuardConfig`: who may use the server, and how much one connection may send."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from foretoken.errors import ConfigError
from foretoken.params import check_number, check_whole

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class GuardConfig:
    """Access and limits of the HTTP server. Sizes in bytes, times in seconds.

    - `host`: the address that the server listens on; on a loopback address only local `Host` values pass.
    - `api_key`, `admin_key`: one key for users, one for admin routes; `keys_file`: more keys (`keys.read_keys`).
    - `insecure`: allow a public address without any key.
    - `metrics_public`: `/metrics` needs no key.
    - `allowed_hosts`: further `Host` values, without port; on a public address an empty list allows all of them.
    - `cors_origins`: origins such as "https://app.example" whose pages may call the server; "*" is every origin.
    - `max_body_bytes`: a longer body is refused with 413 as soon as it is known to be longer.
    - `max_header_bytes`: request line and headers together; `max_headers`: their number (431).
    - `header_timeout_s`: from the first byte of a request to the end of its headers; then the connection is closed.
    - `body_timeout_s`: from the end of the headers to the end of the body, and one second more for each
      `min_body_bytes_per_s` received; then 408.
    - `keep_alive_s`: how long an idle connection stays open; `max_connections`: a further one gets 503 and is closed.

    Raises:
        ConfigError, InputError: a value that cannot be honoured; names the field.
    """

    host: str = "127.0.0.1"
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    keys_file: str | None = None
    insecure: bool = False
    metrics_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB  # as in SERVING: images are not taken, and no context of tokens is longer
    max_header_bytes: int = 64 * KIB  # far above any client's, far below what would fill the memory
    max_headers: int = 256
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: int = 16 * KIB  # slower than any usable line
    keep_alive_s: float = 5.0
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name in ("allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for origin in self.cors_origins:
            _check_origin(origin)
        for name in ("max_body_bytes", "max_header_bytes", "max_headers", "min_body_bytes_per_s", "max_connections"):
            check_whole(name, getattr(self, name), low=1)
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s"):
            check_number(name, getattr(self, name), low=0.001, high=86_400.0)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach `host`."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine alone; a unix socket (`unix:PATH`) does."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost") or name.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _texts(name: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(one, str) and one for one in value):
        raise ConfigError(name, value, "must be a list of texts that are not empty")
    return tuple(one.lower() for one in value)


def _check_origin(origin: str) -> None:
    """An origin as browsers write it: scheme, host, port where it is not the usual one."""
    if origin == "*":
        return
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.hostname or origin != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError("cors_origins", origin, "write origins as https://host or https://host:port, or * for all")
