"""What a request says of the structure of its answer: formats, schemas, tools."""

from __future__ import annotations

from typing import Any

from foretoken.server.api.errors import invalid, unsupported
from foretoken.server.api.messages import MessageShaper, PlainMessage
from foretoken.server.api.schemas import ChatRequest, SamplingFields


def structure_of(body: SamplingFields) -> dict[str, Any]:
    """Fields of `SamplingParams` that hold the answer to a structure.

    Raises:
        ApiError: a format that does not exist, or that this server does not have.
    """
    if body.structured_outputs is not None:
        raise unsupported("structured_outputs", "is not supported; use response_format")
    form = body.response_format
    if form is None or form.get("type") == "text":
        return {}
    if form.get("type") == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.get("type") == "json_schema":
        described = form.get("json_schema")
        if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
            raise invalid("response_format.json_schema", "must have a schema")
        return {"json_schema": described["schema"]}
    raise invalid("response_format.type", "must be text, json_object or json_schema")


def tools_of(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the chat template lists.

    Raises:
        ApiError: tools, which this server does not have.
    """
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", "this server has no tools")
    return None


def shaper_of(body: ChatRequest) -> MessageShaper:
    """What makes message deltas of one answer's text."""
    assert not body.tools or body.tool_choice == "none"
    return PlainMessage()
