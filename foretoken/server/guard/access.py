"""What a request needs, by its path: nothing, a key, or an admin key. Everything that is not listed needs a key."""

from __future__ import annotations

from typing import Literal

from foretoken.server.guard.keys import Identity, KeyRing
from foretoken.server.guard.origins import Headers, values_of

Need = Literal["nothing", "key", "admin"]

# Read by load balancers and browsers before anybody can send a key.
PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})
METRICS_PATHS = frozenset({"/metrics"})
ADMIN_SEGMENTS = frozenset({"admin", "debug"})
_READING = frozenset({"GET", "HEAD"})


def need_of(method: str, path: str, public_paths: frozenset[str] = PUBLIC_PATHS) -> Need:
    """What a request needs; `path` is `scope["path"]`, decoded. Only exact paths are public, and only to read.

    A path whose first segment is an admin one, in any spelling, needs the admin key.
    """
    first = next((segment for segment in path.split("/") if segment not in ("", ".", "..")), "")
    if first.strip().casefold() in ADMIN_SEGMENTS:
        return "admin"
    return "nothing" if path in public_paths and method in _READING else "key"


def identify(keys: KeyRing, headers: Headers) -> Identity | None:
    """Who sends a request: the key behind `Authorization: Bearer`, or in `x-api-key`. None: no key, or a wrong one.

    More than one key in a request is none.
    """
    if keys.is_open:
        return Identity()
    tokens = [*values_of(headers, b"x-api-key")]
    for value in values_of(headers, b"authorization"):
        scheme, _, token = value.partition(" ")
        tokens.append(token.strip() if scheme.lower() == "bearer" else "")
    return keys.find(tokens[0].encode("latin-1")) if len(tokens) == 1 and tokens[0] else None
