"""A name for every request: taken from its header or made up, on every response and in the log."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.server.api.errors import final

_log = logging.getLogger("foretoken.server")
HEADER = b"x-request-id"
_VALID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_SCOPE_KEY = "foretoken.request_id"


def is_request_id(text: str) -> bool:
    """Whether a client may call its request so."""
    return _VALID.fullmatch(text) is not None


def request_id_of(scope: MutableMapping[str, Any]) -> str:
    """The request's name: the one in the scope, a valid one in its header, or a new one; kept in the scope."""
    found = scope.get(_SCOPE_KEY)
    if not isinstance(found, str):
        given = next((value for name, value in scope.get("headers", ()) if name == HEADER), b"").decode("latin-1")
        found = scope[_SCOPE_KEY] = given if is_request_id(given) else secrets.token_hex(12)
    return found


def name_request(scope: MutableMapping[str, Any], request_id: str) -> None:
    """Call the request as its body says."""
    scope[_SCOPE_KEY] = request_id


class RequestIds:
    """ASGI layer: a response to every request, whatever breaks, and `x-request-id` on it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id_of(scope)
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != HEADER]
                message["headers"] = [*headers, (HEADER, request_id_of(scope).encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # the client gets an envelope, the log gets the traceback
            _log.exception("request %s broke down", request_id_of(scope))
            if has_begun:
                raise
            error = final(500, "internal_error", "the server failed to answer this request")
            await error.response()(scope, receive, send_with_id)
