"""What a request says of the structure of its answer: formats, schemas, tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from foretoken.backend.events import ModelInfo
from foretoken.server.api.errors import unsupported
from foretoken.server.api.forms import structure_fields
from foretoken.server.api.messages import MessageShaper, PlainMessage
from foretoken.server.api.schemas import ChatRequest, SamplingFields
from foretoken.server.api.tool_reader import ToolReader, ToolStyle
from foretoken.server.api.tools import Callables, callables, held_form


def structure_of(body: SamplingFields, info: ModelInfo) -> Mapping[str, Any]:
    """Fields of `SamplingParams` that hold the answer to a structure.

    Raises:
        ApiError: a format that does not exist, contradicts another field, or that this server does not have.
    """
    form = structure_fields(body.response_format, body.structured_outputs)
    if form and not info.has_tokenizer:
        raise unsupported("response_format", "the model has no tokenizer; leave it out")
    if not isinstance(body, ChatRequest):
        return form
    called, style = _called(body, info), _style(info)
    if not called.functions or style is None:
        return form
    is_parallel = body.parallel_tool_calls is not False and not called.is_single
    return held_form(called, style, is_parallel, form)


def tools_of(body: ChatRequest, info: ModelInfo) -> list[dict[str, Any]] | None:
    """The tools that the chat template lists; none where none may be called.

    Raises:
        ApiError: tools that the model does not take.
    """
    if not _called(body, info).functions:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]


def shaper_of(body: ChatRequest, info: ModelInfo) -> MessageShaper:
    """What makes message deltas of one answer's text."""
    called, style = _called(body, info), _style(info)
    if not called.functions or style is None:
        return PlainMessage()
    return ToolReader(style, [function.name for function in called.functions])


def source_of(body: SamplingFields, param: str | None) -> str | None:
    """The field of the request behind a field of `SamplingParams` that an error names."""
    if param not in ("json_schema", "regex", "grammar"):
        return param
    if body.structured_outputs is not None:
        return "structured_outputs"
    return "tools" if isinstance(body, ChatRequest) and body.tools and param == "grammar" else "response_format"


def _called(body: ChatRequest, info: ModelInfo) -> Callables:
    return callables(body.tools, body.tool_choice, _style(info))


def _style(info: ModelInfo) -> ToolStyle | None:
    return cast(ToolStyle | None, info.tool_style)
