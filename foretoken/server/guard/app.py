"""`Guard`: one pure-ASGI layer around the application, closed by default: everything that is not listed needs a key.

It decides by `scope["path"]` alone: a path that is rebuilt from the `Host` header can be chosen by the client
(CVE-2026-48746). Starlette's CORS middleware is not used because it answers in plain text, and because what is refused
here needs the same headers. The body of a request is counted while it is read, and given a time; what is answered in
place of the application is in the API's envelope of errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.api.envelopes import envelope, id_headers
from foretoken.server.api.errors import ApiError, final, json_response, later
from foretoken.server.guard.config import GuardConfig
from foretoken.server.guard.keys import Identity, KeyRing, key_ring
from foretoken.server.guard.origins import Headers, Origins, values_of
from foretoken.server.record import CALLER_KEY, RECORDED_KEY, request_id_of

Need = Literal["nothing", "key", "admin"]

# Read by load balancers and browsers before anybody can send a key.
PUBLIC_PATHS = frozenset({"/", "/health", "/ready"})
METRICS_PATHS = frozenset({"/metrics"})
ADMIN_SEGMENTS = frozenset({"admin", "debug"})
_READING = frozenset({"GET", "HEAD"})

_SAFE_HEADERS = ((b"x-content-type-options", b"nosniff"),)


class Guard:
    """`app` behind the checks of `config`; `PUBLIC_PATHS` are read without a key.

    The application finds the `Caller` of a request in its scope (`record.caller_of`).

    Raises:
        ConfigError: keys that are malformed.
        StorageError: the file of keys cannot be read.
    """

    def __init__(self, app: ASGIApp, config: GuardConfig) -> None:
        self._app, self._config, self._keys, self._origins = app, config, key_ring(config), Origins(config)
        self._bodies = HeldBodies(config.max_total_body_bytes)
        self._public = PUBLIC_PATHS | (METRICS_PATHS if config.metrics_public else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route takes WebSockets
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: Headers = scope["headers"]
        added = [*_SAFE_HEADERS, *self._origins.response_headers(headers)]
        request = GuardedRequest(scope, receive, send, self._config, added, self._bodies)
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
        finally:
            request.let_go()

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
            most = f"at most {config.max_headers} headers, together {config.max_header_bytes} bytes, are taken"
            return ApiError(431, "headers_too_large", f"the headers are too large: {most}")
        if not self._origins.allows_host(headers):
            message = "the Host header does not name this server: use its address, or allow the name with allowed_hosts"
            return ApiError(403, "host_not_allowed", message)
        if not self._origins.allows_origin(headers):
            message = "pages of this origin may not call the server: allow it with cors_origins"
            return ApiError(403, "origin_not_allowed", message)
        sizes = values_of(headers, b"content-length")
        if len(set(sizes)) > 1 or not all(size.isascii() and size.isdigit() and len(size) < 20 for size in sizes):
            return ApiError(400, "invalid_value", "content-length: must be one whole number of bytes", "content-length")
        if values_of(headers, b"transfer-encoding") and (sizes or scope.get("http_version") == "1.0"):
            # the end of such a body cannot be told for certain (RFC 9112, section 6.1)
            message = (
                "transfer-encoding: cannot stand beside content-length, nor in HTTP/1.0; send one of the two headers"
            )
            return ApiError(400, "invalid_value", message, "transfer-encoding")
        if sizes and int(sizes[0]) > config.max_body_bytes:
            return body_too_large(int(sizes[0]), config.max_body_bytes)
        return None

    def _identity(self, scope: Scope) -> Identity | ApiError:
        """Who sends the request, or why it is refused."""
        need = need_of(scope["method"], scope["path"], self._public)
        identity = identify(self._keys, scope["headers"])
        if need == "admin" and not (self._keys.has_admin and (identity is None or identity.is_admin)):
            return ApiError(403, "forbidden", "this route needs the admin key")
        if identity is None and need != "nothing":
            message = "a valid API key is needed: send the header Authorization: Bearer KEY, or x-api-key: KEY"
            return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
        return identity or Identity()


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


_LINGER_S = 2.0  # how long a refused client may go on sending before its connection is closed


_FREE_BODY_BYTES = 64 << 10  # of each body: small requests pass while others' large ones fill the room


class HeldBodies:
    """Counts the bytes of bodies that are held at once, against a limit of `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0

    def take(self, num_bytes: int, num_own: int) -> ApiError | None:
        """Count more bytes of a body that has `num_own` so far; an error where there is no room beside the others."""
        if num_bytes and self._num_bytes > num_own and self._num_bytes + num_bytes > self._max_bytes:
            message = f"the bodies of all requests have {self._max_bytes} bytes together: come again later"
            return later(503, "rate_limited", message, retry_after_s=1)
        self._num_bytes += num_bytes
        return None

    def give_back(self, num_bytes: int) -> None:
        """The bytes of a body are no longer held."""
        self._num_bytes -= num_bytes
        assert self._num_bytes >= 0


class GuardedRequest:
    """`receive` and `send` of one request for the application behind the guard.

    `added_headers` go to every response. After `refuse` the application sees a client that left, and what it still
    sends is dropped.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: GuardConfig,
        added_headers: Headers,
        bodies: HeldBodies,
    ) -> None:
        self._scope, self._receive, self._send, self._config = scope, receive, send, config
        self._headers: Headers = scope["headers"]
        self._added_headers = list(added_headers)
        self._bodies, self._num_held = bodies, 0
        self._num_bytes = 0
        self._began_s = asyncio.get_running_loop().time()
        self._is_complete = False  # the whole body was read
        self._has_started = False  # a response was begun
        self.is_refused = False

    async def receive(self) -> Message:
        """The next message. A body that is too long or too slow ends the request."""
        if self.is_refused:
            return {"type": "http.disconnect"}
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            text = f"the body came too slowly: {self._num_bytes} bytes were read before the timeout"
            await self.refuse(final(408, "request_timeout", text))  # clients retry a 408 unless asked not to
            return {"type": "http.disconnect"}
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
            if self._num_bytes > self._config.max_body_bytes:
                await self.refuse(body_too_large(self._num_bytes, self._config.max_body_bytes))
                return {"type": "http.disconnect"}
            if (full := self._hold()) is not None:
                await self.refuse(full)
                return {"type": "http.disconnect"}
        return message

    def let_go(self) -> None:
        """The application is done with the request, and with its body."""
        self._bodies.give_back(self._num_held)
        self._num_held = 0

    def _hold(self) -> ApiError | None:
        """Count what was read of the body; an error where there is no room for it."""
        wanted = max(0, self._num_bytes - _FREE_BODY_BYTES) - self._num_held
        full = self._bodies.take(wanted, self._num_held)
        if full is None:
            self._num_held += wanted
        return full

    async def send(self, message: Message) -> None:
        """Pass on what the application answers, with the added headers."""
        if self.is_refused:
            return
        if message["type"] == "http.response.start":
            self._has_started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._added_headers]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer in place of the application, if it has not begun to, and close the connection where a body is left."""
        self.is_refused = True
        self._scope[RECORDED_KEY] = True  # for the application it would be a client that left
        if self._has_started:
            return
        has_body = self._announces_body() and not self._is_complete
        headers, body = raw(error, request_id_of(self._scope), self._scope["path"])
        headers += [*self._added_headers, *([(b"connection", b"close")] if has_body else [])]
        await self._send({"type": "http.response.start", "status": error.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        if has_body and error.status_code != 408 and not values_of(self._headers, b"expect"):
            await self._discard_body()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def _deadline_s(self) -> float:
        return self._began_s + self._config.body_timeout_s + self._num_bytes / self._config.min_body_bytes_per_s

    def _announces_body(self) -> bool:
        sizes: Sequence[str] = values_of(self._headers, b"content-length")
        return bool(values_of(self._headers, b"transfer-encoding")) or any(size.strip("0") for size in sizes)

    async def _discard_body(self) -> None:
        """Read on for a moment: a connection that is closed with bytes unread loses the answer on its way."""
        num_left, is_open = 2 * self._config.max_body_bytes, True
        try:
            async with asyncio.timeout(_LINGER_S):
                while is_open and num_left > 0:
                    message = await self._receive()
                    num_left -= len(message.get("body", b""))
                    is_open = message["type"] == "http.request" and message.get("more_body", False)
        except TimeoutError:
            return


def body_too_large(num_bytes: int, max_bytes: int) -> ApiError:
    """413: a body of `num_bytes` or more."""
    return ApiError(413, "body_too_large", f"the body has {num_bytes} bytes or more: at most {max_bytes} are taken")


def raw(error: ApiError, request_id: str, path: str = "") -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error, for a response that is sent without a framework; `path` "" where none was read."""
    response = json_response(envelope(error, path, request_id), error.status_code, error.headers)
    return [*response.raw_headers, *id_headers(path, request_id)], bytes(response.body)
