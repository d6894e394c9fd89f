"""What the guard answers in place of the application, in the API's envelope of errors."""

from __future__ import annotations

from foretoken.server.api.errors import ApiError, final, json_response

Headers = list[tuple[bytes, bytes]]


def no_key() -> ApiError:
    """401: no key, or a wrong one."""
    message = "a valid API key is needed: send the header Authorization: Bearer KEY"
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def no_admin() -> ApiError:
    """403: a route for operators."""
    return ApiError(403, "forbidden", "this route needs the admin key")


def bad_host() -> ApiError:
    """403: `Host` names another server."""
    message = "the Host header does not name this server: use its address, or allow the name with allowed_hosts"
    return ApiError(403, "host_not_allowed", message)


def bad_origin() -> ApiError:
    """403: a page of another site."""
    message = "pages of this origin may not call the server: allow it with cors_origins"
    return ApiError(403, "origin_not_allowed", message)


def bad_length() -> ApiError:
    """400: a length that is no number, or two of them."""
    return ApiError(400, "invalid_value", "content-length: must be one whole number of bytes", "content-length")


def bad_framing() -> ApiError:
    """400: a body whose end cannot be told for certain (RFC 9112, section 6.1)."""
    message = "transfer-encoding: cannot stand beside content-length, nor in HTTP/1.0; send one of the two headers"
    return ApiError(400, "invalid_value", message, "transfer-encoding")


def not_http() -> ApiError:
    """400: bytes that are no request."""
    return ApiError(400, "invalid_value", "these bytes are no HTTP request that can be read")


def body_too_large(num_bytes: int, max_bytes: int) -> ApiError:
    """413: a body of `num_bytes` or more."""
    return ApiError(413, "body_too_large", f"the body has {num_bytes} bytes or more: at most {max_bytes} are taken")


def body_too_slow(num_bytes: int) -> ApiError:
    """408: the body did not come in time. Clients retry a 408 unless they are asked not to."""
    return final(408, "request_timeout", f"the body came too slowly: {num_bytes} bytes were read before the timeout")


def headers_too_large(max_bytes: int, max_headers: int) -> ApiError:
    """431: too many headers, or too long ones."""
    message = f"the headers are too large: at most {max_headers} headers, together {max_bytes} bytes, are taken"
    return ApiError(431, "headers_too_large", message)


def too_many_connections() -> ApiError:
    """503: no more connections are taken for now."""
    return ApiError(503, "rate_limited", "too many connections: come again later", headers={"retry-after": "1"})


def raw(error: ApiError, request_id: str) -> tuple[Headers, bytes]:
    """Headers and body of an error, for a response that is sent without a framework."""
    response = json_response(error.body, error.status_code, error.headers)
    return [*response.raw_headers, (b"x-request-id", request_id.encode("ascii"))], bytes(response.body)
