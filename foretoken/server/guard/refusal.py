"""What the guard answers in place of the application, in the envelope of every error."""

from __future__ import annotations

import json
from dataclasses import dataclass

from foretoken.server.guard.origins import Headers


@dataclass(frozen=True)
class Refusal:
    """A response without the application."""

    status: int
    kind: str
    message: str
    code: str
    extra: Headers = ()

    def body(self) -> bytes:
        """The JSON envelope."""
        error = {"message": self.message, "type": self.kind, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        """Headers for it."""
        return [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body())).encode()),
            (b"x-request-id", request_id.encode()),
            (b"x-should-retry", b"false"),
            *self.extra,
        ]


NO_KEY = Refusal(
    401,
    "authentication_error",
    "a valid API key is needed: send the header Authorization: Bearer KEY",
    "invalid_api_key",
    ((b"www-authenticate", b"Bearer"),),
)
NO_ADMIN = Refusal(403, "permission_error", "this route needs the admin key", "admin_key_required")
BAD_HOST = Refusal(
    403,
    "permission_error",
    "the Host header does not name this server: use its address, or allow the name with allowed_hosts",
    "host_not_allowed",
)
BAD_ORIGIN = Refusal(
    403,
    "permission_error",
    "pages of this origin may not call the server: allow it with cors_origins",
    "origin_not_allowed",
)
BAD_LENGTH = Refusal(
    400, "invalid_request_error", "content-length must be one whole number of bytes", "invalid_content_length"
)


def body_too_large(num_bytes: int, most_bytes: int) -> Refusal:
    """413: a body of `num_bytes` or more."""
    message = f"the body has {num_bytes} bytes or more: at most {most_bytes} are taken"
    return Refusal(413, "invalid_request_error", message, "body_too_large")


def body_too_slow(num_bytes: int) -> Refusal:
    """408: the body did not come in time."""
    message = f"the body came too slowly: {num_bytes} bytes were read before the timeout"
    return Refusal(408, "invalid_request_error", message, "body_timeout")


def headers_too_large(most_bytes: int, most_headers: int) -> Refusal:
    """431: too many headers, or too long ones."""
    message = f"the headers are too large: at most {most_headers} headers, together {most_bytes} bytes, are taken"
    return Refusal(431, "invalid_request_error", message, "headers_too_large")
