"""Errors name the fields of the request as it was sent, not those of the chat or the text that it stands for."""

from __future__ import annotations

from pydantic import BaseModel

from foretoken.server.api.errors import ApiError, clean
from foretoken.server.api.schemas import SamplingFields

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
