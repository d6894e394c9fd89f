"""`guarded`: one pure-ASGI layer around the application, closed by default: everything that is not listed needs a key.

It decides by `scope["path"]` alone: a path that is rebuilt from the `Host` header can be chosen by the client
(CVE-2026-48746). Starlette's CORS middleware is not used because it answers in plain text, and because what is refused
here needs the same headers.
"""

from __future__ import annotations

from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.server.api.errors import ApiError
from foretoken.server.guard.config import GuardConfig
from foretoken.server.guard.keys import Identity, KeyRing, key_ring
from foretoken.server.guard.origins import Headers, Origins, values_of
from foretoken.server.guard.request import (
    GuardedRequest,
    bad_framing,
    bad_host,
    bad_length,
    bad_origin,
    body_too_large,
    headers_too_large,
    no_admin,
    no_key,
)
from foretoken.server.record import CALLER_KEY

Need = Literal["nothing", "key", "admin"]

# Read by load balancers and browsers before anybody can send a key.
PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})
METRICS_PATHS = frozenset({"/metrics"})
ADMIN_SEGMENTS = frozenset({"admin", "debug"})
_READING = frozenset({"GET", "HEAD"})

_SAFE_HEADERS = ((b"x-content-type-options", b"nosniff"),)


def guarded(app: ASGIApp, config: GuardConfig, public_paths: frozenset[str] = frozenset()) -> ASGIApp:
    """`app` behind the checks of `config`; `public_paths` are read without a key, besides `PUBLIC_PATHS`.

    The application finds the `Caller` of a request in its scope (`record.caller_of`).

    Raises:
        ConfigError: keys that are malformed.
        StorageError: the file of keys cannot be read.
    """
    return _Guard(app, config, public_paths)


class _Guard:
    def __init__(self, app: ASGIApp, config: GuardConfig, public_paths: frozenset[str]) -> None:
        self._app, self._config, self._keys, self._origins = app, config, key_ring(config), Origins(config)
        self._public = PUBLIC_PATHS | public_paths | (METRICS_PATHS if config.metrics_public else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route takes WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: Headers = scope["headers"]
        added = [*_SAFE_HEADERS, *self._origins.response_headers(headers)]
        request = GuardedRequest(scope, receive, send, self._config, added)
        refusal = self._of_headers(scope)
        if refusal is None and self._origins.is_preflight(scope["method"], headers):
            await self._answer_preflight(request, headers)
            return
        found = refusal or self._identity(scope)
        if isinstance(found, ApiError):
            await request.refuse(found)
        else:
            scope[CALLER_KEY] = found.caller
            await self._pass_on(scope, request)

    async def _pass_on(self, scope: Scope, request: GuardedRequest) -> None:
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:  # what an application raises whose client seems to have left; it was answered here
            if not request.is_refused:
                raise

    async def _answer_preflight(self, request: GuardedRequest, headers: Headers) -> None:
        answer = [*self._origins.preflight_headers(headers), (b"content-length", b"0")]
        await request.send({"type": "http.response.start", "status": 204, "headers": answer})
        await request.send({"type": "http.response.body", "body": b""})

    def _of_headers(self, scope: Scope) -> ApiError | None:
        """What speaks against a request before anybody is identified."""
        headers, config = scope["headers"], self._config
        num_bytes = sum(len(name) + len(value) + 4 for name, value in headers)
        num_bytes += len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if num_bytes > config.max_header_bytes or len(headers) > config.max_headers:
            return headers_too_large(config.max_header_bytes, config.max_headers)
        if not self._origins.allows_host(headers):
            return bad_host()
        if not self._origins.allows_origin(headers):
            return bad_origin()
        sizes = values_of(headers, b"content-length")
        if len(set(sizes)) > 1 or not all(size.isascii() and size.isdigit() and len(size) < 20 for size in sizes):
            return bad_length()
        if values_of(headers, b"transfer-encoding") and (sizes or scope.get("http_version") == "1.0"):
            return bad_framing()
        if sizes and int(sizes[0]) > config.max_body_bytes:
            return body_too_large(int(sizes[0]), config.max_body_bytes)
        return None

    def _identity(self, scope: Scope) -> Identity | ApiError:
        """Who sends the request, or why it is refused."""
        need = need_of(scope["method"], scope["path"], self._public)
        identity = identify(self._keys, scope["headers"])
        if need == "admin" and not self._keys.has_admin:
            return no_admin()
        if identity is None:
            return Identity() if need == "nothing" else no_key()
        if need == "admin" and not identity.is_admin:
            return no_admin()
        return identity


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
