"""The body of `/v1/responses`, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from foretoken.server.api.body import ListOf, RequestPart
from foretoken.server.api.errors import UNION_MARK, invalid, unsupported
from foretoken.server.api.forms import ResponseFormat, json_form
from foretoken.server.api.messages import checked_role
from foretoken.server.api.schemas import (
    ChatRequest,
    Count,
    Items,
    OwnNames,
    SamplingFields,
    ShortText,
    TokenLimit,
    Whole,
)
from foretoken.server.api.tools import (
    ALLOWED,
    MAX_TOOLS,
    NAMED,
    AllowedTools,
    AllowedToolsChoice,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolChoice,
    ToolMode,
    choice_tag,
)

_INCLUDES = ("message.output_text.logprobs", "reasoning.encrypted_content")  # the second adds nothing here


class ResponsesTool(FunctionTool):
    """A function, whose fields stand beside its type here."""

    type: Literal["function"]


class HostedTool(RequestPart):
    """A tool that OpenAI's servers run, or whose calls are no function calls. No answer here calls it."""

    type: Literal[
        "apply_patch",
        "code_interpreter",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    ]


_FUNCTION, _HOSTED = UNION_MARK + "function", UNION_MARK + "hosted"


def _tool_tag(given: object) -> str:
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    return _HOSTED if isinstance(kind, str) and kind != "function" else _FUNCTION


OfferedTool = Annotated[
    Annotated[ResponsesTool, Tag(_FUNCTION)] | Annotated[HostedTool, Tag(_HOSTED)], Discriminator(_tool_tag)
]


class NamedResponsesTool(NamedFunction):
    """`tool_choice` that forces one function."""

    type: Literal["function"]


class AllowedResponsesTools(RequestPart):
    """`tool_choice` that leaves some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedResponsesTool], Field(min_length=1, max_length=MAX_TOOLS)]


ResponsesToolChoice = Annotated[
    ToolMode | Annotated[NamedResponsesTool, Tag(NAMED)] | Annotated[AllowedResponsesTools, Tag(ALLOWED)],
    Discriminator(choice_tag),
]


class ResponseTextFormat(RequestPart):
    """`text.format`, whose fields stand beside its type here."""

    type: Literal["text", "json_object", "json_schema"]
    name: ShortText | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestPart):
    """`text`: the form of the answer."""

    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(RequestPart):
    """`reasoning`: what the chat template may be given."""

    effort: ShortText | None = None
    summary: ShortText | None = None


class ResponsesRequest(SamplingFields):
    """The body of `/v1/responses`, as far as no state is kept between requests."""

    own_names: ClassVar[OwnNames] = {
        "messages": ("input",),
        "max_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
        "response_format": ("text.format",),
        "tools.function.parameters": ("tools.parameters",),
        "reasoning_effort": ("reasoning.effort",),
    }

    input: Items
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: Annotated[ListOf[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    top_logprobs: Whole | None = None
    include: ListOf[str] | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: ShortText | None = None
    conversation: ShortText | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: Count | None = None


def wants_logprobs(body: ResponsesRequest) -> bool:
    """Whether the texts of the response have log-probabilities."""
    return _INCLUDES[0] in (body.include or ())


def functions_of(body: ResponsesRequest) -> list[ResponsesTool]:
    """The tools that an answer may call."""
    return [tool for tool in body.tools or () if isinstance(tool, ResponsesTool)]


def left_out(body: ResponsesRequest) -> list[str]:
    """The types of the tools that no answer here calls: agents offer some of them with every request."""
    return sorted({tool.type for tool in body.tools or () if isinstance(tool, HostedTool)})


def as_chat(body: ResponsesRequest, template_roles: Sequence[str]) -> ChatRequest:
    """The chat request that a response answers; its fields were checked already, those of `input` are checked here.
    `template_roles` are those that the chat template names.

    Raises:
        ApiError: a field that needs state between requests, or that does not exist here.
    """
    _refuse_state(body)
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return ChatRequest.model_construct(
        **shared
        | {
            "messages": _messages(body, template_roles),
            "max_tokens": None,
            "max_completion_tokens": body.max_output_tokens if body.max_output_tokens is not None else body.max_tokens,
            "logprobs": wants_logprobs(body),
            "top_logprobs": body.top_logprobs if wants_logprobs(body) else None,
            "tools": None if body.tools is None else [_tool(tool) for tool in functions_of(body)],
            "tool_choice": _choice(body),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format(body),
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        }
    )


def _refuse_state(body: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls"):
        if getattr(body, name):
            raise unsupported(name, "is not supported: no state is kept between requests; send the whole input")
    if body.truncation == "auto":
        raise unsupported("truncation", "auto is not supported; shorten the input")
    if (body.n or 1) > 1:
        raise unsupported("n", "a response has one answer")
    unknown = [name for name in body.include or () if name not in _INCLUDES]
    if unknown:
        raise unsupported("include", f"takes {_INCLUDES[0]} only")


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return body.response_format
    if form.type != "json_schema":
        return ResponseFormat.model_construct(type=form.type)
    if form.schema_ is None:
        raise invalid("text.format", "type json_schema needs a name and a schema")
    return json_form(form.schema_, form.name or "answer")


def _tool(tool: ResponsesTool) -> Tool:
    function = FunctionTool.model_construct(**{name: getattr(tool, name) for name in FunctionTool.model_fields})
    return Tool.model_construct(type="function", function=function)


def _choice(body: ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, NamedResponsesTool):
        return _named(choice)
    if isinstance(choice, AllowedResponsesTools):
        allowed = AllowedTools.model_construct(mode=choice.mode, tools=[_named(tool) for tool in choice.tools])
        return AllowedToolsChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    return choice


def _named(tool: NamedResponsesTool) -> NamedToolChoice:
    return NamedToolChoice.model_construct(type="function", function=NamedFunction.model_construct(name=tool.name))


def _messages(body: ResponsesRequest, template_roles: Sequence[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        _add_item(messages, f"input.{place}", item, template_roles)
    return messages


def _add_item(
    messages: list[dict[str, Any]], param: str, item: Mapping[str, Any], template_roles: Sequence[str]
) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = checked_role(param, item.get("role"), template_roles)
        content = _text(f"{param}.content", item.get("content"))
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if not isinstance(item.get(name), str):
                raise invalid(f"{param}.{name}", "a function_call has the texts call_id, name and arguments")
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{param}.call_id", "must name the call that it answers")
        content = _text(f"{param}.output", item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind != "reasoning":  # which agents send back as they got it; no chat template has a place for it
        kinds = "message, function_call, function_call_output or reasoning"
        raise unsupported(f"{param}.type", f"is not supported; give {kinds}")


def _text(param: str, content: object) -> str:
    """The text of a content that is a text or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise invalid(param, "must be a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(param, "each part must be an object with a type")
        if part["type"] not in ("input_text", "output_text", "text"):
            raise unsupported(param, "this model reads text only")
        if not isinstance(part.get("text"), str):
            raise invalid(param, "a part must have a text")
        texts.append(part["text"])
    return "\n".join(texts)
