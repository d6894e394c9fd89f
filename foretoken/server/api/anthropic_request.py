"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from foretoken.server.api.body import ListOf, RequestPart
from foretoken.server.api.errors import ApiError, invalid, unsupported
from foretoken.server.api.forms import json_form
from foretoken.server.api.messages import ends_open
from foretoken.server.api.schemas import (
    ChatRequest,
    Count,
    OwnNames,
    SamplingFields,
    ServiceTier,
    ShortText,
    TokenLimit,
)
from foretoken.server.api.tools import MAX_TOOLS, FunctionTool, NamedFunction, NamedToolChoice, Tool, ToolChoice

_MAX_TURNS = 100_000  # Anthropic's
_ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
_SHOWN_TYPE = re.compile(r"[a-z0-9_]{1,64}")  # a type of a tool, and no other text, is repeated in an error
_EFFORTS = {"xhigh": "high", "max": "high"}  # what chat templates know at most
_CHOICES: dict[str, Literal["auto", "required", "none"]] = {"auto": "auto", "any": "required", "none": "none"}
_ROLES = ("user", "assistant", "system")
_IGNORED = ("thinking", "redacted_thinking")
# What Anthropic's models read and this server does not, with what to send in its place.
_READ_ELSEWHERE = "this model reads text only; send what it says as a block of type text"
_RUN_ELSEWHERE = "tools that Anthropic runs do not exist here; leave the block out"
_UNSUPPORTED = {
    **dict.fromkeys(("image", "document", "search_result", "browser_state"), _READ_ELSEWHERE),
    **dict.fromkeys(
        (
            "server_tool_use",
            "web_search_tool_result",
            "web_fetch_tool_result",
            "code_execution_tool_result",
            "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result",
            "tool_search_tool_result",
            "tool_reference",
            "mcp_tool_use",
            "mcp_tool_result",
            "container_upload",
        ),
        _RUN_ELSEWHERE,
    ),
    "compaction": "no context is edited here; send what it says as a block of type text",
}
_TAKEN = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}


def _as_tier(value: object) -> object:
    return "default" if value == "standard_only" else value


class MessagesTool(RequestPart):
    """A tool: the client's own, or one of those that Anthropic runs or knows, which are refused."""

    type: ShortText | None = None
    name: _ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: ListOf[str] | None = None
    input_examples: list[Any] | None = None


class MessagesToolChoice(RequestPart):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(RequestPart):
    """`thinking`: what the chat template may be given."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class OutputFormat(RequestPart):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestPart):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class TokenCountRequest(SamplingFields):
    """The body of `/v1/messages/count_tokens`."""

    own_names: ClassVar[OwnNames] = {
        "stop": ("stop_sequences",),
        "response_format": ("output_config.format", "output_format"),
        "response_format.json_schema": ("output_config.format.schema", "output_format.schema"),
        "tools.function.parameters": ("tools.input_schema",),
        "chat_template_kwargs": ("thinking",),
        "reasoning_effort": ("output_config.effort",),
    }

    messages: Annotated[ListOf[dict[str, Any]], Field(min_length=1, max_length=_MAX_TURNS)]
    system: str | ListOf[dict[str, Any]] | None = None
    tools: Annotated[ListOf[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the earlier name of `output_config.format`
    stop_sequences: ListOf[str] | None = None
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
    messages = chat_messages(body.system, body.messages)
    return ChatRequest.model_construct(
        **shared
        | {
            "messages": messages,
            "continue_final_message": ends_open(messages),
            "stop": body.stop if body.stop_sequences is None else body.stop_sequences,
            "tools": None if body.tools is None else [_tool(f"tools.{i}", tool) for i, tool in enumerate(body.tools)],
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": body.response_format if form is None else json_form(form.schema_),
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
    edits = (body.context_management or {}).get("edits") or []
    if not isinstance(edits, list):
        raise invalid("context_management.edits", "must be a list")
    for place, edit in enumerate(edits):
        # thinking that is sent back is left out in any case, so that there is nothing to clear
        if not isinstance(edit, dict) or not str(edit.get("type")).startswith("clear_thinking_"):
            param = f"context_management.edits.{place}.type"
            raise unsupported(param, "is not supported: no context is edited here; send what the model should read")


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


def _thinking(asked: ThinkingOptions | None) -> dict[str, Any] | None:
    """What is said to templates that can turn thinking on and off, under both of their names for it."""
    if asked is None:
        return None
    is_on = asked.type != "disabled"
    return {"enable_thinking": is_on, "thinking": is_on}


def chat_messages(system: str | Sequence[Any] | None, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Turns of one role that follow each other are one; blocks of text are joined by line ends;
    thinking that is sent back is left out.

    Raises:
        ApiError: a malformed turn, a block of another type, a result of a call that was not made, or a last turn that
            calls tools.
    """
    chat = _Chat()
    if system:
        chat.add_text("system", _texts("system", system))
    for place, turn in enumerate(turns):
        chat.add_turn(f"messages.{place}", turn)
    messages = chat.messages()
    if not messages:
        raise invalid("messages", "have no text and no tool that the model could read")
    if messages[-1].get("tool_calls"):
        message = "has calls: a turn with their tool_result blocks must follow"
        raise invalid(f"messages.{len(turns) - 1}.content", message)
    return messages


class _Chat:
    """Messages as they are put together; a content is a list of its texts until the end, to copy none twice."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._functions: dict[str, str] = {}  # by the id of a call

    def messages(self) -> list[dict[str, Any]]:
        """All of them, each with its text."""
        return [{**message, "content": "\n".join(message["content"])} for message in self._messages]

    def add_turn(self, param: str, turn: Mapping[str, Any]) -> None:
        role, content = turn.get("role"), turn.get("content")
        if role not in _ROLES:
            raise invalid(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
        if isinstance(content, str):
            self.add_text(role, content)
            return
        # an answer may have been empty
        if not isinstance(content, list) or not (content or role == "assistant"):
            raise invalid(f"{param}.content", "must be a text or a list of blocks that is not empty")
        for place, block in enumerate(content):
            self._add_block(f"{param}.content.{place}", role, block)

    def add_text(self, role: str, text: str) -> None:
        texts = self._message_of(role)["content"]
        if texts == [""]:  # an empty text is no line of its own
            texts.clear()
        texts.append(text)

    def _message_of(self, role: str) -> dict[str, Any]:
        """The last message if it has this role, or a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _add_block(self, param: str, role: str, block: object) -> None:
        kind = _type(param, block)
        assert isinstance(block, dict)
        if kind in _IGNORED and role == "assistant":
            return
        if kind not in _TAKEN[role]:
            raise _refusal(param, kind, f"a turn of role {role} has {' and '.join(_TAKEN[role])}")
        if kind == "text":
            self.add_text(role, _text(param, block))
        elif kind == "tool_use":
            self._add_call(param, block)
        else:
            self._add_result(param, block)

    def _add_call(self, param: str, block: Mapping[str, Any]) -> None:
        call_id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, dict):
            raise invalid(param, "a tool_use has the texts id and name, and an object as input")
        try:
            arguments = json.dumps(given, ensure_ascii=False)
        except RecursionError:
            raise invalid(f"{param}.input", "is nested too deeply") from None
        self._functions[call_id] = name
        calls = self._message_of("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def _add_result(self, param: str, block: Mapping[str, Any]) -> None:
        call_id, content = block.get("tool_use_id"), block.get("content")
        if not isinstance(call_id, str) or call_id not in self._functions:
            raise invalid(f"{param}.tool_use_id", "must be the id of a tool_use in a turn before it")
        text = "" if content is None else _texts(f"{param}.content", content)
        if block.get("is_error"):  # chats have no field for it, and a model must not take it for a result
            text = f"Error: {text}"
        name = self._functions[call_id]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": [text]})


def _texts(param: str, content: object) -> str:
    """The text of a content that has nothing else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise invalid(param, "must be a text or a list of blocks")
    found = []
    for place, block in enumerate(content):
        kind = _type(f"{param}.{place}", block)
        if kind != "text":
            raise _refusal(f"{param}.{place}", kind, "only blocks of type text stand here")
        found.append(_text(f"{param}.{place}", block))
    return "\n".join(found)


def _type(param: str, block: object) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise invalid(param, "must be an object with a type")
    return str(block["type"])


def _text(param: str, block: Mapping[str, Any]) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise invalid(f"{param}.text", "must be a text")
    return text


def _refusal(param: str, kind: str, expected: str) -> ApiError:
    """The error for a block that cannot stand where it stands. A type that nobody knows is not repeated."""
    if kind in _UNSUPPORTED:
        return unsupported(f"{param}.type", f"{kind} is not supported: {_UNSUPPORTED[kind]}")
    known = f"{kind} is" if kind in (*_IGNORED, "text", "tool_use", "tool_result") else "is"
    return invalid(f"{param}.type", f"{known} not possible here: {expected}")
