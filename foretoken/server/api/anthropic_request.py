"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they stand for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from foretoken.server.api.anthropic_turns import chat_messages
from foretoken.server.api.errors import invalid, unsupported
from foretoken.server.api.forms import JsonSchemaFormat, ResponseFormat
from foretoken.server.api.schemas import ChatRequest, Count, SamplingFields, ServiceTier, ShortText, TokenLimit
from foretoken.server.api.tools import MAX_TOOLS, FunctionTool, NamedFunction, NamedToolChoice, Tool, ToolChoice

_MAX_TURNS = 100_000  # Anthropic's
_ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
_SHOWN_TYPE = re.compile(r"[a-z0-9_]{1,64}")  # a type of a tool, and no other text, is repeated in an error
_EFFORTS = {"xhigh": "high", "max": "high"}  # what chat templates know at most
_CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}


def _as_tier(value: object) -> object:
    return "default" if value == "standard_only" else value


class MessagesTool(BaseModel):
    """A tool: the client's own, or one of those that Anthropic runs or knows, which are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: ShortText | None = None
    name: _ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class MessagesToolChoice(BaseModel):
    """`tool_choice`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(BaseModel):
    """`thinking`: what the chat template may be given."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class OutputFormat(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """`output_config`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountRequest(SamplingFields):
    """The body of `/v1/messages/count_tokens`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=_MAX_TURNS)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the earlier name of `output_config.format`
    stop_sequences: list[str] | None = None
    service_tier: Annotated[ServiceTier | None, BeforeValidator(_as_tier)] = None
    # without effect
    cache_control: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    speed: ShortText | None = None
    # refused
    container: Any = None
    context_management: dict[str, Any] | None = None
    inference_geo: ShortText | None = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(TokenCountRequest):
    """The body of `/v1/messages`, as far as no state is kept between requests."""

    max_tokens: TokenLimit


def as_chat(body: TokenCountRequest) -> ChatRequest:
    """The chat request that a message answers; its fields were checked already, those of its blocks are checked here.

    Raises:
        ApiError: a block, a tool or a field that does not exist here.
    """
    _refuse_features(body)
    form, effort = body.output_format, None
    if body.output_config is not None:
        form, effort = body.output_config.format or form, body.output_config.effort
    choice = body.tool_choice
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return ChatRequest.model_construct(
        **shared
        | {
            "messages": chat_messages(body.system, body.messages),
            "max_completion_tokens": None,
            "stop": body.stop if body.stop_sequences is None else body.stop_sequences,
            "tools": None if body.tools is None else [_tool(f"tools.{i}", tool) for i, tool in enumerate(body.tools)],
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": body.response_format if form is None else _format(form),
            "reasoning_effort": None if effort is None else _EFFORTS.get(effort, effort),
            "chat_template_kwargs": _thinking(body.thinking),
        }
    )


def _refuse_features(body: TokenCountRequest) -> None:
    if (body.n or 1) > 1:
        raise unsupported("n", "a message is one answer; leave n out")
    if body.stop is not None and body.stop_sequences is not None:
        raise invalid("stop_sequences", "and stop are two names of one field; leave stop out")
    for name, remedy in (
        ("container", "nothing is kept between requests; leave it out"),
        ("mcp_servers", "this server calls nobody; let the client call them, and give their tools in tools"),
        ("inference_geo", "this server runs in one place; leave it out"),
    ):
        if getattr(body, name):
            raise unsupported(name, f"is not supported: {remedy}")
    for place, edit in enumerate(_edits(body.context_management)):
        # thinking that is sent back is left out in any case, so that there is nothing to clear
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith("clear_thinking_"):
            param = f"context_management.edits.{place}.type"
            raise unsupported(param, "is not supported: no context is edited here; send what the model should read")


def _edits(context_management: dict[str, Any] | None) -> list[Any]:
    edits = (context_management or {}).get("edits") or []
    if not isinstance(edits, list):
        raise invalid("context_management.edits", "must be a list")
    return edits


def _tool(param: str, tool: MessagesTool) -> Tool:
    if tool.type not in (None, "custom"):
        named = f"{tool.type} " if _SHOWN_TYPE.fullmatch(tool.type) else ""
        remedy = "tools that Anthropic runs or defines do not exist here; give a name and an input_schema of your own"
        raise unsupported(f"{param}.type", f"{named}is not supported: {remedy}")
    if tool.name is None or tool.input_schema is None:
        missing = "name" if tool.name is None else "input_schema"
        raise invalid(f"{param}.{missing}", "is missing: a tool has a name and an input_schema", code="missing_field")
    if tool.defer_loading:
        raise unsupported(f"{param}.defer_loading", "true is not supported: all tools are shown; leave it out")
    if tool.input_examples:
        raise unsupported(f"{param}.input_examples", "is not supported; write examples into the description")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise unsupported(f"{param}.allowed_callers", "must have direct: no code runs here that could call a tool")
    function = FunctionTool.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool.model_construct(type="function", function=function)


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "is missing: type tool names one of the tools", code="missing_field")
    return NamedToolChoice.model_construct(type="function", function=NamedFunction.model_construct(name=choice.name))


def _format(form: OutputFormat) -> ResponseFormat:
    schema = JsonSchemaFormat.model_construct(name="answer", schema_=form.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _thinking(asked: ThinkingOptions | None) -> dict[str, Any] | None:
    """What is said to templates that can turn thinking on and off, under both of their names for it."""
    if asked is None:
        return None
    is_on = asked.type != "disabled"
    return {"enable_thinking": is_on, "thinking": is_on}
