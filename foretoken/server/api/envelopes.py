"""Errors and streams in the shape of the interface that a request speaks, which its path tells: OpenAI's, under
`/v1/messages` Anthropic's, under `/api` Ollama's, llama.cpp's on its own paths and on those of OpenAI's without `/v1`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from foretoken.errors import ForetokenError
from foretoken.server.api.errors import (
    BODY_KEY,
    CODE_KEY,
    CODES,
    MAX_MESSAGE_BYTES,
    ApiError,
    ErrorCode,
    json_response,
    name_as_sent,
    object_schema,
    of_exception,
    of_validation,
    type_of,
)
from foretoken.server.record import REQUEST_ID_HEADER, request_id_of

MESSAGES_PATH = "/v1/messages"
OLLAMA_PATH = "/api"
INFILL_PATH = "/infill"
TEMPLATE_PATH = "/apply-template"
COUNT_PATH = "/chat/completions/input_tokens"
LLAMA_PATHS = frozenset(
    {"/completion", "/completions", INFILL_PATH, "/props", "/slots", "/chat/completions", "/responses", "/models"}
    | {TEMPLATE_PATH, COUNT_PATH, f"/v1{COUNT_PATH}"}
)
_ID_HEADER = b"request-id"  # Anthropic's clients read this one
OVERLOADED = 529  # Anthropic's number for a server that has no room; 429 stands there for a client that asks too often
_NO_ROOM = ("queue_full", "token_budget_full")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}

_DETAILS = {"error_code": {"enum": list(CODES)}, "param": {"type": ["string", "null"]}}
_FIELDS = {
    "type": {"type": "string"},
    "message": {"type": "string", "maxLength": MAX_MESSAGE_BYTES},
    "details": object_schema(_DETAILS),
}
MESSAGES_ERROR_SCHEMA = object_schema(
    {"type": {"const": "error"}, "error": object_schema(_FIELDS), "request_id": {"type": "string"}}
)


class Wire(NamedTuple):
    """How an interface streams: `error` is the event of an error around its JSON, `ping` what is sent on a stream that
    is silent; `id_headers` name the request.
    """

    media_type: bytes
    ping: bytes
    error: bytes
    id_headers: tuple[bytes, ...] = (REQUEST_ID_HEADER,)


_EVENTS = b"text/event-stream; charset=utf-8"
_OPENAI = Wire(_EVENTS, b": ping\n\n", b"data: %b\n\n")
_ANTHROPIC = Wire(
    _EVENTS, b'event: ping\ndata: {"type":"ping"}\n\n', b"event: error\ndata: %b\n\n", (REQUEST_ID_HEADER, _ID_HEADER)
)
_OLLAMA = Wire(b"application/x-ndjson", b"", b"%b\n")  # a line is an object: there is none that says nothing


def wire_of(path: str) -> Wire:
    """How streams of a path are written."""
    return _ANTHROPIC if _is_messages(path) else _OLLAMA if _is_ollama(path) else _OPENAI


def _is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def _is_ollama(path: str) -> bool:
    return path.startswith(f"{OLLAMA_PATH}/")


def status_of(error: ApiError, path: str) -> int:
    """The HTTP code that is sent."""
    return OVERLOADED if _is_messages(path) and error.code in _NO_ROOM else error.status_code


def envelope(error: ApiError, path: str, request_id: str) -> dict[str, Any]:
    """The error as JSON."""
    if _is_ollama(path):
        return {"error": error.detail, "code": error.code}
    if path in LLAMA_PATHS:
        return {"error": {"code": error.status_code, **_llama(error), "param": error.param, **error.extra}}
    if not _is_messages(path):
        return {"error": {**error.body["error"], "message": _openai_message(error)}}
    status = status_of(error, path)
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error"),
            "message": _message(error),
            "details": {"error_code": error.code, "param": error.param, **error.extra},
        },
        "request_id": request_id,
    }


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The whole answer to a request of this ASGI scope."""
    path = str(scope["path"])
    return json_response(envelope(error, path, request_id_of(scope)), status_of(error, path), error.headers)


def error_event(error: ApiError, path: str, request_id: str) -> bytes:
    """What ends a stream that an error cut off."""
    return wire_of(path).error % msgspec.json.encode(envelope(error, path, request_id))


def id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers of every response that name its request."""
    return [(name, request_id.encode("ascii")) for name in wire_of(path).id_headers]


def _openai_message(error: ApiError) -> str:
    """The text of an error; that of a long prompt has OpenAI's words and the code, since clients show the text alone
    and know by either that they must shorten it.
    """
    if error.code == "context_length_exceeded" and "n_prompt_tokens" in error.extra:
        num_prompt, num_context = error.extra["n_prompt_tokens"], error.extra["n_ctx"]
        more = " or more" if "tokens or more" in error.detail else ""  # a very long prompt is not counted whole
        return (
            f"{error.param}: this model's maximum context length is {num_context} tokens, "
            f"and the prompt has {num_prompt}{more}; shorten it to at most {num_context - 1} ({error.code})"
        )
    return error.detail


def _llama(error: ApiError) -> dict[str, str]:
    """Type and text of an error in llama.cpp's words, by which its clients know that a prompt is too long."""
    if error.code == "context_length_exceeded":
        text = f"the request exceeds the available context size: {error.detail}"
        return {"type": "exceed_context_size_error", "message": text[:MAX_MESSAGE_BYTES]}
    kind = "not_supported_error" if error.status_code == HTTPStatus.NOT_IMPLEMENTED else type_of(error.status_code)
    return {"type": kind, "message": error.detail}


def _message(error: ApiError) -> str:
    """The text of an error; that of a long prompt is Anthropic's, by which agents know that they must shorten it."""
    if error.code == "context_length_exceeded" and "n_prompt_tokens" in error.extra:
        num_max = error.extra["n_ctx"] - 1  # a token of the answer needs room, too
        return f"prompt is too long: {error.extra['n_prompt_tokens']} tokens > {num_max} maximum"
    return error.detail


# ---- from the framework

_BY_STATUS: dict[int, ErrorCode] = {
    404: "route_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
}
_NO_ROUTE = (
    "Not Found: there is no such route here; OpenAI's begin with v1, "
    "and embeddings, reranking, pictures and audio are not offered"
)


def install_handlers(app: FastAPI, retry_after_s: int) -> None:
    """Give every error of the application the envelope."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _send(request, error)

    @app.exception_handler(ForetokenError)
    async def backend_error(request: Request, error: ForetokenError) -> Response:
        return _send(request, of_exception(error, retry_after_s))

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return _send(request, of_validation(error.errors()))

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        status = error.status_code
        code: ErrorCode = _BY_STATUS.get(status, "invalid_value" if status < 500 else "internal_error")
        text = _NO_ROUTE if status == HTTPStatus.NOT_FOUND else HTTPStatus(status).phrase
        return _send(request, ApiError(status, code, text, headers=error.headers))


def _send(request: Request, error: ApiError) -> Response:
    name_as_sent(error, request.scope.get(BODY_KEY))
    request.scope[CODE_KEY] = error.code
    return error_response(error, request.scope)
