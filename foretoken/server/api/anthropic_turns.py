"""Turns of Anthropic's content blocks as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.server.api.errors import ApiError, invalid, unsupported

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


def chat_messages(system: str | Sequence[Any] | None, turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Turns of one role that follow each other are one; blocks of text are joined by line
    ends; thinking that is sent back is left out.

    Raises:
        ApiError: a malformed turn, a block of another type, a result of a call that was not made, or a last turn of the
            assistant.
    """
    chat = _Chat()
    if system:
        chat.add_text("system", _texts("system", system))
    for place, turn in enumerate(turns):
        chat.add_turn(f"messages.{place}", turn)
    if turns[-1].get("role") == "assistant":
        param = f"messages.{len(turns) - 1}.role"
        raise unsupported(param, "assistant is not supported in the last turn: an answer cannot be begun for the model")
    return chat.messages


class _Chat:
    """Messages as they are put together."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._functions: dict[str, str] = {}  # by the id of a call

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
        message = self._message_of(role)
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text

    def _message_of(self, role: str) -> dict[str, Any]:
        """The last message if it has this role, or a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

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
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": text})


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
