"""Finds the calls in an answer as its text comes, for models that write them as JSON.

Three styles, named after what the chat template shows the model (`foretoken.backend.local`):

- "tags": `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, between texts (Hermes, Qwen);
- "json_arguments", "json_parameters": the answer is one such object, or a list of them (Mistral; Llama 3).

What does not become a call, such as one of a function that was not offered, is text of the answer, unchanged.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any, Literal

ToolStyle = Literal["tags", "json_arguments", "json_parameters"]
OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"

Delta = dict[str, Any]  # the `delta` of a chat chunk, or an entry of its `tool_calls`
_Found = list[str | Delta] | None  # text and parts of calls; None where a state needs more text

# The beginning of a call up to its arguments, and everything that can still become one.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_HEAD_PART = re.compile(
    r'\s*(?:\{\s*(?:"(?:n|na|nam|name(?:"\s*(?::\s*(?:"[^"\\]*(?:"\s*(?:,\s*(?:"[a-z]*(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?)?)?'
)
_OPENING = re.compile(r"\s*(?:\[\s*)?")  # before the first call where there are no tags
_BETWEEN = re.compile(r"[\s,;\]]*")  # between calls, and behind the last one


class MessageShaper:
    """Makes the message of one answer from its text, piece by piece: here the text itself."""

    def __init__(self) -> None:
        self._content = ""

    def push(self, text: str) -> list[Delta]:
        """The deltas that `text`, the next part of the answer, is certain to add, in the order of the text: each has
        `content` or `tool_calls`.
        """
        self._content += text
        return [{"content": text}] if text else []

    def finish(self, finish_reason: str) -> tuple[list[Delta], str]:
        """What was held back, and the reason why the answer ended."""
        return [], finish_reason

    @property
    def is_within_call(self) -> bool:
        """Whether the text ended before the arguments of its last call did."""
        return False

    def message(self) -> dict[str, Any]:
        """Fields of the whole message, after `finish`: `content` and others, without the role."""
        return {"content": self._content}


class ToolReader(MessageShaper):
    """Splits one answer's text into content and calls of the functions in `names`; `only_calls`: the answer is held to
    calls, and what is none is the beginning of one that was cut off.
    """

    def __init__(self, style: ToolStyle, names: Collection[str], only_calls: bool = False) -> None:
        super().__init__()
        self._only_calls = only_calls
        self._has_tags, self._names = style == "tags", frozenset(names)
        self._held = ""  # text that is not decided yet
        self._read = self._read_text if self._has_tags else self._read_opening
        self._value = _ObjectEnd()
        self._is_behind_call = False  # nothing but white space since a call
        self._dropped = ""  # what stood before the call whose beginning is being read
        self._num_begun = 0
        self._is_cut = False
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> list[Delta]:
        """See `MessageShaper.push`."""
        self._held += text
        return self._run(False)

    def finish(self, finish_reason: str) -> tuple[list[Delta], str]:
        """What was held back, and why the answer ended: "tool_calls" where it has some and was not cut off. The
        beginning of a call that was cut off before its arguments is dropped.
        """
        self._is_cut = finish_reason == "length"
        deltas = self._run(True)
        return deltas, "tool_calls" if self._calls and finish_reason == "stop" else finish_reason

    @property
    def is_within_call(self) -> bool:
        """See `MessageShaper.is_within_call`."""
        return bool(self._calls) and self._read == self._read_arguments

    def message(self) -> dict[str, Any]:
        """See `MessageShaper.message`; `content` is None beside calls alone."""
        if not self._calls:
            return super().message()
        return {"content": self._content or None, "tool_calls": self._calls}

    def _run(self, is_over: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while (found := self._read(is_over)) is not None:
            for part in found:
                if not (self._only_calls and isinstance(part, str)):
                    _append(deltas, part)
        for delta in deltas:
            self._content += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                self._take_in(part)
        return deltas

    def _take_in(self, part: Delta) -> None:
        """Keep a part of a call for the whole message."""
        if "id" not in part:
            self._calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            return
        whole = {name: value for name, value in part.items() if name != "index"}
        self._calls.append({**whole, "function": dict(part["function"])})

    # ---- states: each returns what it found when it got on, None when it needs more text

    def _read_text(self, is_over: bool) -> _Found:
        """Between tags. White space around calls is dropped."""
        if self._is_behind_call:
            self._held = self._held.lstrip()
        before, tag, behind = self._held.partition(OPEN_TAG)
        if tag:
            text = before.rstrip()
            self._dropped = before[len(text) :] + tag
            self._held, self._read = behind, self._read_tagged_head
            return _content(text)
        if is_over:
            self._held = ""
            return _content(before.rstrip() if self._num_begun else before) if before else None
        ready = before[: len(before) - len(_may_begin(before, OPEN_TAG))].rstrip()
        if not ready:
            return None
        self._held, self._is_behind_call = before[len(ready) :], False
        return _content(ready)

    def _read_tagged_head(self, is_over: bool) -> _Found:
        head = _HEAD.match(self._held)
        if head is not None and head[1] in self._names:
            return self._begin(head)
        place = self._held.find(CLOSE_TAG)
        if place < 0 and not is_over:
            return None
        self._read = self._read_text
        inside, self._held = (
            (self._held, "") if place < 0 else (self._held[:place], self._held[place + len(CLOSE_TAG) :])
        )
        if place < 0 and self._is_cut and _HEAD_PART.fullmatch(inside):
            return []
        call = _whole_call(inside, self._names) if place >= 0 else None
        self._is_behind_call = call is not None
        if call is None:
            return _content(self._dropped + inside + (CLOSE_TAG if place >= 0 else ""))
        return [self._started(call[0]), self._arguments(call[1])]

    def _read_opening(self, is_over: bool) -> _Found:
        """At the beginning of an answer without tags, which is a call or is text."""
        opening = _OPENING.match(self._held)
        assert opening is not None
        return self._read_call(self._held[opening.end() :], self._held, is_over)

    def _read_plain(self, is_over: bool) -> _Found:  # noqa: ARG002 - the form of a state
        text, self._held = self._held, ""
        return _content(text) if text else None

    def _read_arguments(self, is_over: bool) -> _Found:  # noqa: ARG002 - the form of a state
        if not self._held:
            return None
        end = self._value.find(self._held)
        part, self._held = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        if end is not None:
            self._read = self._read_closing if self._has_tags else self._read_brace
            self._value, self._dropped = _ObjectEnd(depth=1), ""
        return [self._arguments(part)]

    def _read_closing(self, is_over: bool) -> _Found:
        """Behind arguments between tags: the rest of the call. Models forget the closing tag: the opening one of the
        next call ends a call, too, and so does the end of the answer.
        """
        places = [place for tag in (CLOSE_TAG, OPEN_TAG) if (place := self._held.find(tag)) >= 0]
        if not places and not is_over:
            return None
        end = min(places, default=len(self._held))
        self._held = _text_behind(self._held[:end]) + self._held[end:].removeprefix(CLOSE_TAG)
        self._read, self._is_behind_call = self._read_text, True
        return []

    def _read_brace(self, is_over: bool) -> _Found:
        """Behind arguments without tags: further fields of the call, which are dropped, and its brace. Models forget
        the brace: what is no field is text.
        """
        if not self._dropped and not is_over and not self._held.strip():
            return None
        if self._dropped or _continues_object(self._held):
            end = self._value.find(self._held)
            if end is None and not is_over:
                self._held, self._dropped = "", self._dropped + self._held
                return None
            self._held = self._dropped + self._held if end is None else self._held[end:]
        self._read = self._read_between
        return []

    def _read_between(self, is_over: bool) -> _Found:
        """Behind a call of an answer without tags: another one, or the end of the list."""
        between = _BETWEEN.match(self._held)
        assert between is not None
        rest = self._held[between.end() :]
        return self._read_call(rest, rest, is_over)

    def _read_call(self, rest: str, text: str, is_over: bool) -> _Found:
        """The call that `rest` begins; None while it may become one. Otherwise there is none, and `text` is read."""
        head = _HEAD.match(rest)
        if head is not None and head[1] in self._names:
            self._held = rest
            return self._begin(head)
        may_begin = head is None and _HEAD_PART.fullmatch(rest) is not None
        if may_begin and not is_over:
            return None
        if may_begin and self._is_cut and self._num_begun:  # behind a call another one was begun
            text = ""
        self._held, self._read = text, self._read_plain
        return []

    # ---- what a state finds

    def _begin(self, head: re.Match[str]) -> list[str | Delta]:
        self._held, self._read, self._value = self._held[head.end() :], self._read_arguments, _ObjectEnd()
        return [self._started(head[1])]

    def _started(self, name: str) -> Delta:
        self._num_begun += 1
        function, call_id = {"name": name, "arguments": ""}, f"call_{secrets.token_hex(12)}"
        return {"index": self._num_begun - 1, "id": call_id, "type": "function", "function": function}

    def _arguments(self, text: str) -> Delta:
        return {"index": self._num_begun - 1, "function": {"arguments": text}}


class _ObjectEnd:
    """Where a JSON object that comes in parts ends."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False

    def find(self, text: str) -> int | None:
        """The place behind the object's last brace in the next part; None if it goes on."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


def side_by_side(deltas: Sequence[Delta]) -> Delta:
    """One delta of several, for an interface in which text and calls have no order."""
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [part for delta in deltas for part in delta.get("tool_calls", ())]
    return {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}


def _append(deltas: list[Delta], part: str | Delta) -> None:
    """Add text or a part of a call, to the last delta where that is of the same text or call."""
    last = deltas[-1] if deltas else {}
    if isinstance(part, str):
        if "content" in last:
            last["content"] += part
        else:
            deltas.append({"content": part})
    elif "tool_calls" in last and last["tool_calls"][0]["index"] == part["index"]:
        last["tool_calls"][0]["function"]["arguments"] += part["function"]["arguments"]
    else:
        deltas.append({"tool_calls": [part]})


def _content(text: str) -> list[str | Delta]:
    return [text] if text else []


def _text_behind(rest: str) -> str:
    """The text behind a call; `rest` is what stands between its arguments and the next tag."""
    end = _ObjectEnd(depth=1).find(rest) if _continues_object(rest) else None
    text = rest if end is None else rest[end:].lstrip("}] \t\r\n")
    return "" if CLOSE_TAG.startswith(text.rstrip()) else text  # a closing tag that was cut off


def _continues_object(rest: str) -> bool:
    """Whether `rest`, behind a value of an object, goes on with the object."""
    return rest.lstrip().startswith(("}", ","))


def _may_begin(text: str, mark: str) -> str:
    """The end of `text` that could be the beginning of `mark`."""
    length = next((one for one in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:one])), 0)
    return text[len(text) - length :]


def _whole_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another order, or whose arguments are JSON in a string."""
    try:
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in names:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str):
            return call["name"], json.dumps(arguments)
        arguments.encode()  # half of a surrogate pair could not be sent
    except (ValueError, RecursionError):
        return None
    return call["name"], arguments
