"""The output items of `/v1/responses`, and the events by which they grow."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

_Json = dict[str, Any]


class ResponseItems:
    """Makes items and events of message deltas (`MessageShaper`). Events have no sequence number yet."""

    def __init__(self) -> None:
        self.items: list[_Json] = []
        self._logprobs: list[_Json] = []  # of tokens whose text is held back
        self._is_open = False

    def add(self, delta: _Json, logprobs: list[_Json]) -> Iterator[_Json]:
        """The events of one delta; `logprobs` are those of its tokens."""
        self._logprobs += logprobs
        if delta.get("content"):
            yield from self._add_text(delta["content"])
        for part in delta.get("tool_calls", ()):
            yield from self._add_call(part)

    def close(self, status: str) -> Iterator[_Json]:
        """The events that end the last item; an answer without a text has an empty one."""
        if not self.items:
            yield from self._open_message()
        yield from self._close(status)

    def _add_text(self, text: str) -> Iterator[_Json]:
        if not self._is_open or self.items[-1]["type"] != "message":
            yield from self._close("completed")
            yield from self._open_message()
        part = self.items[-1]["content"][0]
        logprobs, self._logprobs = self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        yield {"type": "response.output_text.delta", **self._place(0), "delta": text, "logprobs": logprobs}

    def _add_call(self, part: _Json) -> Iterator[_Json]:
        arguments = part["function"]["arguments"]
        if "id" in part:
            yield from self._close("completed")
            call = {"type": "function_call", "call_id": part["id"], "name": part["function"]["name"], "arguments": ""}
            yield self._open("fc", call)
        self._logprobs = []
        self.items[-1]["arguments"] += arguments
        if arguments:
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _open_message(self) -> Iterator[_Json]:
        yield self._open("msg", {"type": "message", "role": "assistant", "content": []})
        part: _Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **self._place(0), "part": _copy(part)}
        self.items[-1]["content"].append(part)

    def _open(self, prefix: str, item: _Json) -> _Json:
        self._is_open = True
        self.items.append({"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress", **item})
        return {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copy(self.items[-1]),
        }

    def _close(self, status: str) -> Iterator[_Json]:
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        if item["type"] == "message":
            part = item["content"][0]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **self._place(0), **done}
            yield {"type": "response.content_part.done", **self._place(0), "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _place(self, content_index: int | None = None) -> _Json:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if content_index is None else {**place, "content_index": content_index}


def _copy(value: _Json) -> _Json:
    """The item as it is now: lists in it grow later."""
    return {name: list(one) if isinstance(one, list) else one for name, one in value.items()}
