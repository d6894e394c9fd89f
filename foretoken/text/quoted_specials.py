"""Special tokens that messages spell: they stay text when a chat template has laid the messages out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foretoken.errors import InputError

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them for such use, no text has them


class QuotedSpecials:
    """A conversation and its tools in which every special token that they spell has a mark behind its first character.

    `messages` and `tools` go through the template; `parts` finds the marked places in the rendered text.

    Raises:
        InputError: the conversation contains every mark there is.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.messages, self.tools = messages, tools
        self._marked: re.Pattern[str] | None = None
        longest_first = sorted(special_texts, key=len, reverse=True)
        texts = list(_texts([messages, tools]))
        if not any(special in text for text in texts for special in longest_first):
            return
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InputError("messages", "every noncharacter of Unicode", "leave them out; no text has them")
        self._mark = mark
        spelt = re.compile("|".join(map(re.escape, longest_first)))
        self.messages, self.tools = _changed([messages, tools], lambda text: spelt.sub(self._quoted, text))
        self._marked = re.compile("|".join(re.escape(text[:1] + mark + text[1:]) for text in longest_first))

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The rendered text in parts, and whether each is plain text that spells a special token."""
        if self._marked is None:
            yield text, False
            return
        begin = 0
        for found in self._marked.finditer(text):
            if found.start() > begin:
                yield text[begin : found.start()], False
            yield found.group().replace(self._mark, ""), True
            begin = found.end()
        if begin < len(text):
            yield text[begin:], False

    def _quoted(self, found: re.Match[str]) -> str:
        text = found.group()
        return text[:1] + self._mark + text[1:]


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value, names of fields among them: a template may write these too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key,) if isinstance(key, str) else ()
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: object, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - a JSON value of the same shape
    """`value` with `change` applied to all that `_texts` finds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return value
