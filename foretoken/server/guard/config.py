"""`GuardConfig`: who may use the server, and how much one connection may send."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from foretoken.errors import ConfigError
from foretoken.option import Settings
from foretoken.params import check_number, check_whole

KIB = 1 << 10
MIB = 1 << 20
KEY_VARIABLE = "FORETOKEN_API_KEY"  # read where no flag gives the key

_setting = Settings("Access and connections")


@dataclass(frozen=True)
class GuardConfig:
    """Access and limits of the HTTP server. Sizes in bytes, times in seconds. Beside what the options say:

    - `host`: on a loopback address only local `Host` values pass.
    - `allowed_hosts`: without port; on a public address an empty list allows all of them.
    - `cors_origins`: "*" is every origin.
    - `max_body_bytes`: a longer body is refused with 413 as soon as it is known to be longer.
    - `max_total_body_bytes`: of all requests that are read or answered, the first 64 KiB of each not counted. A request
      that would go beyond it is refused with 503, unless it is the only one.
    - `max_header_bytes`: with the request line (431).
    - `header_timeout_s`: from the first byte of a request; then the connection is closed.
    - `body_timeout_s`: from the end of the headers; then 408.
    - `max_connections`: a further one takes the place of the one that has been idle longest, or gets 503 and is closed.
    """

    host: str = _setting(
        "127.0.0.1", "The address to listen on; an address that other machines can reach requires a key."
    )
    api_key: str | None = _setting(
        None,
        "The key that clients send. Every user of the machine can see a flag: prefer @FILE, which reads a file, or "
        f"{KEY_VARIABLE}.",
        repr=False,
    )
    admin_key: str | None = _setting(None, "The key of admin routes; @FILE reads it from a file.", repr=False)
    keys_file: str | None = _setting(
        None, "A TOML file with more keys: a table [NAME] for each, with key or sha256, tenant, admin."
    )
    insecure: bool = _setting(False, "Listen on a public address without any key.")
    metrics_public: bool = _setting(False, "Let /metrics be read without a key.")
    allowed_hosts: tuple[str, ...] = _setting(
        (), "A Host value to accept in addition to local ones; may be given several times.", repeats=True
    )
    cors_origins: tuple[str, ...] = _setting(
        (),
        "An origin whose pages may call the server, such as https://app.example; may be given several times.",
        repeats=True,
    )
    # No context of tokens is longer, and images are not taken.
    max_body_bytes: int = _setting(32 * MIB, "Longest body of a request.")
    # A body takes several times its bytes while it is read and answered: more would fill the memory of small machines.
    max_total_body_bytes: int = _setting(512 * MIB, "Most bytes of the bodies of all requests at once.")
    # Far above any client's, far below what would fill the memory.
    max_header_bytes: int = _setting(64 * KIB, "Longest header block of a request.")
    max_headers: int = _setting(256, "Most headers of a request.")
    header_timeout_s: float = _setting(10.0, "Seconds for the headers of a request.")
    body_timeout_s: float = _setting(
        30.0, "Seconds for the body of a request, plus one for each --min-body-bytes-per-s bytes."
    )
    # Slower than any usable line.
    min_body_bytes_per_s: int = _setting(
        16 * KIB, "Slowest rate at which a body may arrive; a slower request is refused."
    )
    # Longer than clients and proxies keep a connection for their next request (httpx 5 s, aiohttp 15 s, nginx 60 s):
    # who sends one at the moment in which the server closes gets no answer.
    keep_alive_s: float = _setting(75.0, "Seconds that an idle connection stays open.")
    max_connections: int = _setting(1024, "Most connections at once.")

    def __post_init__(self) -> None:
        for name in ("allowed_hosts", "cors_origins"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for origin in self.cors_origins:
            _check_origin(origin)
        sizes = ("max_body_bytes", "max_total_body_bytes", "max_header_bytes", "min_body_bytes_per_s")
        for name in (*sizes, "max_headers", "max_connections"):
            check_whole(name, getattr(self, name), low=1)
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s"):
            check_number(name, getattr(self, name), low=0.001, high=86_400.0)


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
