"""Which part of an answer's text each of its tokens wrote."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from foretoken.backend.call import TokenEvent


class TextShare(NamedTuple):
    """The text that comes with a token, and at which character of the whole text its own begins."""

    text: str
    start: int


class TextDivision:
    """Divides the text of one answer among its tokens, piece by piece, as far as tokens and characters agree.

    A character of several tokens stands with the last of them. Text that was held back stands with the first token of
    the piece that brings it. Tokens that write nothing, such as an end token, have no text. `start` is the number of
    characters before the answer.
    """

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._start = self._num_given = start
        self._owed = ""  # what earlier tokens wrote and no piece has brought yet

    def divide(self, text: str, tokens: Sequence[TokenEvent]) -> list[TextShare]:
        """One entry for each of a piece's tokens; their texts, joined, are the piece's `text`."""
        if not tokens:
            return []
        taken, self._owed = self._taken(text, [self._owed, *map(self._written, tokens)]), ""
        place, found = self._num_given, list[TextShare]()
        for share, held in taken:
            found.append(TextShare(share, place))
            place += len(share) + len(held)
            self._owed += held
        early, first, *others = found
        rest = text[sum(len(one.text) for one in found) :]
        if rest:  # written in another way than its tokens are spelt
            self._owed = ""
        whole = [TextShare(early.text + first.text, first.start), *others]
        whole[-1] = TextShare(whole[-1].text + rest, whole[-1].start)
        self._num_given += len(text)
        return whole

    def _taken(self, text: str, written: Sequence[str]) -> Iterator[tuple[str, str]]:
        """What `text` has of each part that was written, and what of it must still come."""
        place, is_held = 0, False
        for part in written:
            if not place and self._num_given == self._start and text and not text.startswith(" "):
                part = part.removeprefix(" ")  # SentencePiece drops the space in front of a text
            share, held = "", ""
            if is_held:
                held = part
            elif text.startswith(part, place):
                share = part
            elif len(text) - place < len(part) and part.startswith(text[place:]):
                share, is_held = text[place:], True
                held = part[len(share) :]
            place += len(share)
            yield share, held

    def _written(self, token: TokenEvent) -> str:
        return token.text if token.data is None else self._decoder.decode(token.data)
