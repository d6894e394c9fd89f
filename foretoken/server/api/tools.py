"""`tools` and `tool_choice`: which functions an answer may call, and the grammar that holds it to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, StringConstraints, Tag
from pydantic_core import from_json

from foretoken.server.api.body import ListOf, RequestPart
from foretoken.server.api.errors import UNION_MARK, invalid, unsupported
from foretoken.server.api.forms import check_size, json_rule, lark_text
from foretoken.server.api.tool_reader import CLOSE_TAG, OPEN_TAG, ToolStyle

MAX_TOOLS = 128  # OpenAI's
# Words of a schema beside which "no further properties" would say something else.
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
_Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionTool(RequestPart):
    """The function of a tool. `parameters` is a JSON schema, none for a function without arguments."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestPart):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(RequestPart):
    """The function of a `tool_choice`."""

    name: _Name


class NamedToolChoice(RequestPart):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestPart):
    """Those of the tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(RequestPart):
    """`tool_choice` that leaves some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolList = Annotated[ListOf[Tool], Field(max_length=MAX_TOOLS)]
MODE, NAMED, ALLOWED = UNION_MARK + "mode", UNION_MARK + "named", UNION_MARK + "allowed"


def choice_tag(given: object) -> str:
    """Which form of a `tool_choice` this is meant to be, so that an error speaks of that form's fields."""
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    if kind is None and not isinstance(given, Mapping):
        return MODE
    return ALLOWED if kind == "allowed_tools" else NAMED


ToolMode = Annotated[Literal["none", "auto", "required"], Tag(MODE)]
ToolChoice = Annotated[
    ToolMode | Annotated[NamedToolChoice, Tag(NAMED)] | Annotated[AllowedToolsChoice, Tag(ALLOWED)],
    Discriminator(choice_tag),
]


@dataclass(frozen=True)
class Callables:
    """The functions that an answer may call, whether it must call one, and whether that is all it may do."""

    functions: tuple[FunctionTool, ...] = ()
    is_forced: bool = False
    is_single: bool = False


def callables(tools: Sequence[Tool] | None, choice: ToolChoice | None, style: ToolStyle | None) -> Callables:
    """What `tools` and `tool_choice` come to; none without tools and for `tool_choice` "none", whatever the template.

    Raises:
        ApiError: contradictory fields, too long schemas, or a chat template that takes no tools (`style` None).
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools to choose from")
        return Callables()
    functions = {tool.function.name: tool.function for tool in tools}
    if len(functions) < len(tools):
        raise invalid("tools", "two functions have the same name; give each its own")
    check_size("tools", [[tool.function.description or "", tool.function.parameters] for tool in tools])
    if choice == "none":
        return Callables()
    if style is None:
        raise unsupported(
            "tools",
            "the model's chat template takes no tools; leave them out, send tool_choice none, "
            "or start the server with --chat-template and one that takes them",
        )
    names, is_forced = _chosen(functions, choice)
    if not functions.keys() >= set(names):
        raise invalid("tool_choice", "names a function that is not among the tools")
    return Callables(tuple(functions[name] for name in names), is_forced, isinstance(choice, NamedToolChoice))


def held_form(called: Callables, style: ToolStyle, is_parallel: bool, form: Mapping[str, str]) -> Mapping[str, str]:
    """The field of `SamplingParams` that holds an answer with calls to its form; `form` is that of an answer without.

    A forced call, calls beside a form of the answer, those of `strict` functions and calls of which there may be one
    only are held to a grammar; other calls are free.

    Raises:
        ApiError: a form that cannot stand beside tools.
    """
    is_strict = any(function.strict for function in called.functions)
    if called.is_forced or form or is_strict or not is_parallel:
        return {"grammar": _grammar(called, style, is_parallel, form)}
    return {}


def template_message(param: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: arguments of earlier calls as objects, not as JSON text.

    Raises:
        ApiError: a call without a name, or arguments that are no text.
    """
    if not message.get("tool_calls"):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    return {**message, "tool_calls": [_template_call(f"{param}.tool_calls", call) for call in message["tool_calls"]]}


def _template_call(param: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(param, "each must have a function with a name")
    text = function.get("arguments") or ""
    if not isinstance(text, str):
        raise invalid(param, "arguments must be the text of a JSON object")
    arguments = arguments_of(text, is_cut=False)
    try:
        msgspec.msgpack.encode(arguments)
    except OverflowError:  # a number that no worker can be sent; the model may have written it
        arguments = {"INVALID_JSON": text}
    return {**call, "function": {**function, "arguments": arguments}}


def arguments_of(text: str, is_cut: bool) -> dict[str, Any]:
    """The arguments of a call as an object: as far as they came where they were cut off, as Anthropic's clients read
    them from a stream; what is no JSON object stands in one, as Anthropic asks its clients to send such back.
    """
    try:
        found = from_json(text or "{}", allow_partial=is_cut)
    except ValueError:
        return {"INVALID_JSON": text}
    if found is None:  # some models write null for a function without arguments
        return {}
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


def _chosen(functions: Mapping[str, FunctionTool], choice: ToolChoice | None) -> tuple[list[str], bool]:
    if isinstance(choice, NamedToolChoice):
        return [choice.function.name], True
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return list(dict.fromkeys(tool.function.name for tool in allowed.tools)), allowed.mode == "required"
    return list(functions), choice == "required"


def _grammar(called: Callables, style: ToolStyle, is_parallel: bool, form: Mapping[str, str]) -> str:
    call = " | ".join(f"call_{i}" for i in range(len(called.functions)))
    rules = [f"call: {call}", *(f"call_{i}: {_call_rule(one, style)}" for i, one in enumerate(called.functions))]
    if style == "tags":
        first = f"{lark_text(OPEN_TAG)} call"
        rules.append(f"calls: {first}" + (f' ("\\n" {first})*' if is_parallel else ""))
    else:
        rules.append("calls: call" + (' | "[" call (", " call)* "]"' if is_parallel else ""))
    if called.is_forced:
        start = ["start: calls"]
    elif form:
        start = [f"start: calls | {_answer_rule(form)}"]
    elif style == "tags":
        start = _texts_between_calls(is_parallel)
    else:  # text that no reader takes for a call
        start = ["start: calls | other", r"other: OTHER?", r"OTHER: /[^\s{\[](.|\n)*/"]
    return "\n".join([*start, *rules])


def _call_rule(function: FunctionTool, style: ToolStyle) -> str:
    """A Lark expression for a call, as the templates that people use spell it, behind its tag."""
    key = "parameters" if style == "json_parameters" else "arguments"
    begin, end = f'{{"name": "{function.name}", "{key}": ', "}"
    if style == "tags":
        begin, end = f"\n{begin}", f"{end}\n{CLOSE_TAG}"
    parameters = _arguments_schema(function.parameters or {"properties": {}})
    rule = json_rule("tools.function.parameters", parameters, whitespace=" ")  # as templates write them, in one line
    return f"{lark_text(begin)} {rule} {lark_text(end)}"


def _arguments_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: an object, without arguments that it does not name unless it says so."""
    schema = parameters if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}
    if "properties" in schema and not _OPEN.intersection(schema):
        return {**schema, "additionalProperties": False}
    return schema


def _texts_between_calls(is_parallel: bool) -> list[str]:
    """Any text, in which every opening tag is followed by a call; without parallel calls the first one ends it."""
    start = "start: tagged* TEXT" if is_parallel else "start: tagged | TEXT"
    return [start, "tagged: opening call", f"opening[lazy]: TEXT {lark_text(OPEN_TAG)}", r"TEXT: /(.|\n)*/"]


def _answer_rule(form: Mapping[str, str]) -> str:
    if "json_schema" not in form:
        raise unsupported("structured_outputs", "only a JSON form can stand beside tools; leave one of them out")
    try:
        schema = json.loads(form["json_schema"])
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise invalid("structured_outputs.json", "must be a JSON schema: an object")
    return json_rule("response_format.json_schema", schema)
