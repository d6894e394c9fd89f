"""Messages of a chat: those of the request as the template takes them, and what an answer's message is held to and made
of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from foretoken.backend.call import ModelInfo
from foretoken.errors import InputError
from foretoken.server.api.errors import invalid, unsupported
from foretoken.server.api.forms import StructuredOutputs, structure_fields
from foretoken.server.api.schemas import ChatRequest, SamplingFields
from foretoken.server.api.tool_reader import MessageShaper, ToolReader, ToolStyle
from foretoken.server.api.tools import Callables, callables, held_form, template_message
from foretoken.text.grammar import lark_of_gbnf

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's


def checked_messages(messages: Sequence[dict[str, Any]], template_roles: Sequence[str]) -> list[dict[str, Any]]:
    """The messages with their parts of text joined; `template_roles` are those that the chat template names.

    Raises:
        ApiError: a message without content, with a role that nobody knows, or with parts that are not text.
    """
    return [_checked(f"messages.{place}", message, template_roles) for place, message in enumerate(messages)]


def checked_role(param: str, role: object, template_roles: Sequence[str]) -> str:
    """The role of a message. Most templates write whatever they are given, which a model has never seen.

    Raises:
        ApiError: neither one of `ROLES` nor one that the template names.
    """
    if not isinstance(role, str) or (role not in ROLES and role not in template_roles):
        more = [name for name in template_roles if name not in ROLES]
        raise invalid(f"{param}.role", f"must be one of {', '.join((*ROLES, *more))}")
    return role


def _checked(param: str, message: dict[str, Any], template_roles: Sequence[str]) -> dict[str, Any]:
    role = checked_role(param, message.get("role"), template_roles)
    content = message.get("content")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise invalid(f"{param}.tool_call_id", "a message of role tool must name the call that it answers")
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        raise invalid(f"{param}.tool_calls", "must be a list of calls")
    if content is None and not (role == "assistant" and calls):
        raise invalid(f"{param}.content", "must be a text or a list of parts")
    if isinstance(content, list):
        content = "\n".join(_part(param, part) for part in content)
    if content is not None and not isinstance(content, str):
        raise invalid(f"{param}.content", "must be a text or a list of parts")
    return template_message(param, {**message, "content": content or ""})


def _part(param: str, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise invalid(f"{param}.content", "each part must be an object with a type")
    if part["type"] != "text":
        raise unsupported(f"{param}.content", "this model reads text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{param}.content", "a part of type text must have a text")
    return text


def structure_of(body: SamplingFields, info: ModelInfo) -> Mapping[str, Any]:
    """Fields of `SamplingParams` that hold the answer to a structure.

    Raises:
        ApiError: a format that does not exist, contradicts another field, or that this server does not have.
    """
    form = structure_fields(body.response_format, _outputs(body))
    if form and not info.has_tokenizer:
        raise unsupported("response_format", "the model has no tokenizer; leave it out")
    if not isinstance(body, ChatRequest):
        return form
    called, style = _called(body, info), _style(info)
    if not called.functions or style is None:
        return form
    is_parallel = body.parallel_tool_calls is not False and not called.is_single
    return held_form(called, style, is_parallel, form)


def _outputs(body: SamplingFields) -> StructuredOutputs | None:
    """`structured_outputs`, or what stands for it in llama.cpp's words."""
    given = [one for one in (body.structured_outputs, body.json_schema, body.grammar) if one is not None]
    if len(given) > 1:
        raise invalid("structured_outputs", "give one of structured_outputs, json_schema and grammar")
    if body.json_schema is not None:
        return StructuredOutputs.model_construct(json_=body.json_schema)
    if body.grammar:
        try:
            return StructuredOutputs.model_construct(grammar=lark_of_gbnf(body.grammar))
        except InputError as error:
            raise invalid("grammar", error.remedy) from error
    return body.structured_outputs


def tools_of(body: ChatRequest, info: ModelInfo) -> list[dict[str, Any]] | None:
    """The tools that the chat template lists, if any may be called.

    Raises:
        ApiError: the model takes none of them.
    """
    if not _called(body, info).functions:
        return None
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools or ()]


def shaper_of(body: ChatRequest, info: ModelInfo) -> MessageShaper:
    """What makes message deltas of one answer's text."""
    called, style = _called(body, info), _style(info)
    if not called.functions or style is None:
        return MessageShaper()
    return ToolReader(style, [function.name for function in called.functions], called.is_forced)


def _called(body: ChatRequest, info: ModelInfo) -> Callables:
    return callables(body.tools, body.tool_choice, _style(info))


def _style(info: ModelInfo) -> ToolStyle | None:
    return cast(ToolStyle | None, info.tool_style)


def ends_open(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the assistant's text, which an answer continues in the interfaces that always do so:
    Anthropic's, Ollama's and llama.cpp's.
    """
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")
