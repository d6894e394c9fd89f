"""Special tokens in the text of a message stay text: a chat template cannot tell them from its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretoken.errors import InputError

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them for such use, no text has them


class QuotedSpecials:
    """A conversation in which every special token that a message spells has a mark behind its first character.

    `messages` go through the template; `parts` finds the marked places in what came of them.

    Raises:
        InputError: a message contains every mark there is.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], special_texts: Sequence[str]) -> None:
        self.messages: Sequence[Mapping[str, Any]] = messages
        self._marked: re.Pattern[str] | None = None
        longest_first = sorted(special_texts, key=len, reverse=True)
        texts = list(_texts(messages))
        if not any(special in text for text in texts for special in longest_first):
            return
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InputError("messages", "every noncharacter of Unicode", "leave them out; no text has them")
        self._mark = mark
        spelt = re.compile("|".join(map(re.escape, longest_first)))
        self.messages = [_replaced(message, lambda text: spelt.sub(self._quoted, text)) for message in messages]
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
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, change: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The same JSON value with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, change) for item in value]
    return value
