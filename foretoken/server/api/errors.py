"""Every error of the API as one JSON envelope: status, type and code from closed sets, messages without secrets. It
names the fields of the request as it was sent, not those of the chat or the text that it stands for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
from fastapi import HTTPException, Response
from pydantic import BaseModel

from foretoken import errors
from foretoken.backend.call import AnswerFailed

if TYPE_CHECKING:
    from foretoken.server.api.schemas import SamplingFields

ErrorCode = Literal[
    # the request
    "invalid_json",
    "not_an_object",
    "duplicate_key",
    "invalid_value",
    "missing_field",
    "unknown_field",
    "context_length_exceeded",
    "capacity_exceeded",
    "too_many_tokens",
    "unsupported_feature",
    "unsupported_media_type",
    "body_too_large",
    "headers_too_large",
    "request_timeout",
    # who and where
    "missing_api_key",
    "invalid_api_key",
    "forbidden",
    "host_not_allowed",
    "origin_not_allowed",
    "model_not_found",
    "route_not_found",
    "method_not_allowed",
    # load
    "queue_full",
    "token_budget_full",
    "rate_limited",
    "loading",
    "draining",
    "restarting",
    "engine_failed",
    # what happened on the way
    "queue_deadline",
    "generation_deadline",
    "client_gone",
    "slow_consumer",
    "numerical_error",
    "engine_error",
    "worker_died",
    "internal_error",
]
CODES: tuple[str, ...] = get_args(ErrorCode)
MAX_MESSAGE_BYTES = 1024
CODE_KEY = "foretoken.error_code"  # of the ASGI scope: the code of the error that was sent
CLIENT_GONE = 499  # nginx's number for a client that left; logged, never sent

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "overloaded",
    503: "unavailable_error",
}
_PATH = re.compile(r"(?:[A-Za-z]:\\|~?/)(?:[^\s/\\:;,'\"()]+[/\\])+[^\s/\\:;,'\"()]*")
_NAMED_ROUTES = frozenset({"/v1/models", "/v1/completions", "/api/chat"})  # of remedies
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_LINES = re.compile(r"\s+")

Responses = dict[int | str, dict[str, Any]]  # of a route, as FastAPI takes their descriptions


def object_schema(properties: Mapping[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """The JSON schema of an object, which has all of `properties` where `required` does not say which."""
    return {
        "type": "object",
        "required": list(properties if required is None else required),
        "properties": dict(properties),
    }


def error_responses(schema: Mapping[str, Any]) -> Responses:
    """The description of a route's errors, whose bodies have this schema."""
    return {"default": {"description": "An error", "content": {"application/json": {"schema": schema}}}}


_FIELDS = {
    "message": {"type": "string", "maxLength": MAX_MESSAGE_BYTES},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"enum": list(CODES)},
}
ERROR_SCHEMA = object_schema({"error": object_schema(_FIELDS)})


class ApiError(HTTPException):
    """An error as the client gets it. `param` names the field; `extra` are further fields of the envelope."""

    def __init__(
        self,
        status: int,
        code: ErrorCode,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        **extra: int,
    ) -> None:
        assert code in CODES
        super().__init__(status, clean(message), dict(headers or {}))
        self.code, self.param, self.extra = code, param, extra

    @property
    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {
            "error": {
                "message": self.detail,
                "type": type_of(self.status_code),
                "param": self.param,
                "code": self.code,
                **self.extra,
            }
        }


def type_of(status: int) -> str:
    """The error's type by its HTTP code."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def clean(text: str) -> str:
    """A message without paths of files, addresses and line breaks, at most `MAX_MESSAGE_BYTES` long."""
    text = _LINES.sub(" ", text[: 4 * MAX_MESSAGE_BYTES])
    text = _PATH.sub(lambda found: found[0] if found[0] in _NAMED_ROUTES else "<path>", text)
    text = _ADDRESS.sub("<address>", text)
    data = text.encode("utf-8", "replace")
    return text if len(data) <= MAX_MESSAGE_BYTES else data[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def unsupported(param: str, message: str) -> ApiError:
    """400 for a feature that this model or server does not have."""
    return ApiError(400, "unsupported_feature", f"{param}: {message}", param)


def invalid(param: str, message: str, value: object = None, code: ErrorCode = "invalid_value") -> ApiError:
    """400 for a field; `value` is shown if it is a number."""
    return ApiError(400, code, f"{param}: {message}{shown(value)}", param)


def shown(value: object) -> str:
    """A number in parentheses; nothing for texts and everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    number = f"{value:.6g}" if isinstance(value, float) else str(value) if abs(value) < 10**30 else "a longer number"
    return f" (got {number})"


def later(status: Literal[429, 503], code: ErrorCode, message: str, retry_after_s: int) -> ApiError:
    """An error that may not come again: `Retry-After` says when to try."""
    return ApiError(status, code, message, headers={"retry-after": str(retry_after_s)})


def final(status: int, code: ErrorCode, message: str) -> ApiError:
    """An error of the server that must not be retried by itself: the request may be its cause."""
    return ApiError(status, code, message, headers={"x-should-retry": "false"})


# ---- from the errors of the package


def of_exception(error: Exception, retry_after_s: int) -> ApiError:
    """The API's error for an exception of the package; anything unknown is an internal error without a text."""
    match error:
        case errors.ContextLengthError():
            return ApiError(400, "context_length_exceeded", str(error), "prompt")
        case errors.InputError():
            return invalid(error.field, error.remedy, error.value)
        case errors.OverloadedError():
            return later(429, "queue_full", str(error), retry_after_s)
        case errors.CapacityError():
            return ApiError(400, "capacity_exceeded", str(error), "max_tokens")
        case errors.UnavailableError():
            return unavailable("restarting", retry_after_s)
        case errors.CheckpointError() if "chat template" in str(error):
            # a template that breaks or never ends does so on what the client sent; other files are the operator's
            return ApiError(400, "unsupported_feature", f"messages: {error}", "messages")
        case errors.UnsupportedModelError():
            return ApiError(400, "unsupported_feature", str(error))
        case errors.ForetokenError():
            return _engine_error(type(error).__name__)
    return final(500, "internal_error", "the server failed to answer this request")


def of_length(
    error: errors.ContextLengthError, n_ctx: int, max_tokens: int | None = None, param: str = "prompt"
) -> ApiError:
    """The API's error for a prompt that does not fit into a context of `n_ctx` tokens."""
    made = ApiError(400, "context_length_exceeded", str(error), param)
    found = re.match(r"\d+", str(error.value))
    made.extra |= {"n_ctx": n_ctx} | ({} if max_tokens is None else {"max_tokens": max_tokens})
    made.extra |= {} if found is None else {"n_prompt_tokens": int(found.group())}
    return made


def of_failure(event: AnswerFailed) -> ApiError:
    """The API's error for an answer that failed inside the engine."""
    if event.field:  # found out on the way, such as a structure that has no room for `min_tokens`
        return invalid(event.field, event.message)
    return _engine_error(event.error)


def _engine_error(name: str) -> ApiError:
    """The error for a failure of the engine, by the name of its class."""
    if name == "NumericsError":
        return final(500, "numerical_error", "the model computed numbers that are not finite for this request")
    if name in ("WorkerDiedError", "RankError"):
        return final(500, "worker_died", "the engine's process died while this request ran; it is being restarted")
    return final(500, "engine_error", "the engine failed on this request; others go on")


def unavailable(state: str, retry_after_s: int) -> ApiError:
    """503 for a backend in this state; one that says "ready" was not so a moment ago."""
    code: ErrorCode = _BY_STATE.get(state, "loading")
    return later(503, code, f"the server takes no requests now: {code}", retry_after_s)


_BY_STATE: dict[str, ErrorCode] = {"draining": "draining", "restarting": "restarting", "failed": "engine_failed"}


# ---- from the framework

_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
UNION_MARK = "|"  # in front of the tags of unions, which pydantic puts into the place of what it finds


def of_validation(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """400 for the first of pydantic's findings; it names the field, and the value if that is a number."""
    first = found[0]
    place = [str(part) for part in first["loc"] if part != "body" and not str(part).startswith(UNION_MARK)]
    param = ".".join(part if _NAME.fullmatch(part) else "?" for part in place) or None
    kind = str(first["type"])
    code: ErrorCode = "missing_field" if kind == "missing" else "not_an_object" if param is None else "invalid_value"
    if kind in _OWN_CODES:
        code = _OWN_CODES[kind]
    more = f" ({len(found) - 1} more problems)" if len(found) > 1 else ""
    label = param or "the body"
    return ApiError(400, code, f"{label}: {first['msg']}{shown(first.get('input'))}{more}", param)


_OWN_CODES: dict[str, ErrorCode] = {"extra_forbidden": "unknown_field", "unsupported_feature": "unsupported_feature"}


BODY_KEY = "foretoken.body"  # of the ASGI scope: the request as it was sent


def name_as_sent(error: ApiError, body: SamplingFields | None) -> None:
    """Give the field of an error its name in the request, in its text too: some clients show nothing else."""
    if body is None or error.param is None:
        return
    sent = _sent(body, _source(body, error.param))
    if error.detail.startswith(f"{error.param}:"):
        error.detail = clean(sent + error.detail.removeprefix(error.param))
    error.param = sent


def _sent(body: SamplingFields, param: str) -> str:
    """The request's own name of a field of a chat or a text, or of a place in it."""
    place = param
    while place not in body.own_names and "." in place:
        place = place.rpartition(".")[0]
    own = body.own_names.get(place)
    if own is None:
        return param
    given = [name for name in own if _is_given(body, name)]
    return given[0] if given else param if _is_given(body, param) else own[0]


def _is_given(body: SamplingFields, path: str) -> bool:
    """Whether the request has a value there; only the part of the path that names fields of objects is followed."""
    value: object = body
    for place, name in enumerate(path.split(".")):
        if not isinstance(value, BaseModel) or name not in type(value).model_fields:
            return place > 0 and value is not None
        value = getattr(value, name)
    return value is not None


def _source(body: SamplingFields, param: str) -> str:
    """The field of a chat or a text behind a field of `SamplingParams` that an error names."""
    forms = [name for name in ("json_schema", "grammar") if getattr(body, name) is not None]
    if param.startswith("structured_outputs") and body.structured_outputs is None and forms:
        return forms[0]
    if param not in ("json_schema", "regex", "grammar") or param in forms:
        return param
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "tools" if param == "grammar" and getattr(body, "tools", None) else "response_format"
