"""The Host and Origin headers: which of them pass, and what CORS adds to a response.

A page of another site that a browser has open can send requests to this machine. `Origin` names that site. A site whose
name was pointed at this machine (DNS rebinding) is of the same origin for the browser, but its name stands in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from foretoken.server.guard.config import GuardConfig, is_loopback

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_USUAL_PORTS = {"http": 80, "https": 443}
_METHODS = b"GET, POST, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, request-id, retry-after, x-should-retry"
_MAX_AGE_S = b"600"

Headers = Sequence[tuple[bytes, bytes]]


def values_of(headers: Headers, name: bytes) -> list[str]:
    """All values of a header; names are in lower case, as ASGI has them."""
    return [value.decode("latin-1") for key, value in headers if key == name]


class Origins:
    """Which Host and Origin values a configuration lets pass."""

    def __init__(self, config: GuardConfig) -> None:
        self._is_loopback, self._hosts = is_loopback(config.host), frozenset(config.allowed_hosts)
        self._origins = frozenset(config.cors_origins)

    def allows_host(self, headers: Headers) -> bool:
        """Whether there is one well-formed Host that may be meant."""
        hosts = values_of(headers, b"host")
        parts = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if parts is None:
            return False
        name = parts["name"].rstrip(".").lower()
        if name in self._hosts:
            return True
        return _is_local(name) if self._is_loopback else not self._hosts

    def allows_origin(self, headers: Headers) -> bool:
        """Whether no page sends the request, or one of this server, or one of a listed origin."""
        origins = values_of(headers, b"origin")
        if not origins:
            return True
        if len(origins) > 1:
            return False
        return self.is_listed(origins[0]) or _is_own(origins[0], values_of(headers, b"host")[0])

    def is_listed(self, origin: str) -> bool:
        """Whether CORS is on for an origin."""
        return "*" in self._origins or origin.lower() in self._origins

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Whether a browser asks for a listed origin what its page may send."""
        origins = values_of(headers, b"origin")
        return (
            method == "OPTIONS"
            and bool(values_of(headers, b"access-control-request-method"))
            and bool(origins)
            and self.is_listed(origins[0])
        )

    def response_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What lets a page of a listed origin read the response; no credentials, so cookies never count."""
        if not self._origins:
            return []
        vary = [(b"vary", b"Origin")]
        origins = values_of(headers, b"origin")
        if not origins or not self.is_listed(origins[0]):
            return vary
        return [
            (b"access-control-allow-origin", origins[0].encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED),
            *vary,
        ]

    def preflight_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The answer to a preflight, `response_headers` apart."""
        asked = ", ".join(values_of(headers, b"access-control-request-headers"))
        names = [name.strip() for name in asked.split(",")]
        allowed = ", ".join(name for name in names if re.fullmatch(r"[A-Za-z0-9-]{1,64}", name))
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", allowed.encode()),
            (b"access-control-max-age", _MAX_AGE_S),
        ]


def _is_local(name: str) -> bool:
    """Whether a host name stands for this machine wherever it is resolved."""
    if is_loopback(name):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_own(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from the server that is addressed as `host`."""
    scheme, _, page = origin.lower().partition("://")
    own, other, usual = _HOST.fullmatch(host.lower()), _HOST.fullmatch(page), _USUAL_PORTS.get(scheme)
    if own is None or other is None or usual is None:
        return False
    return own["name"] == other["name"] and int(own["port"] or usual) == int(other["port"] or usual)
