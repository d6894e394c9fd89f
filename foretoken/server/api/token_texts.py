"""Which part of an answer's text each of its tokens wrote."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from foretoken.backend.call import TokenEvent

_SKIPPED = 3  # times as many characters as tokens write are looked through where a text is spelt otherwise


class TextShare(NamedTuple):
    """The text that comes with a token, and at which character of the whole text its own begins."""

    text: str
    start: int


class TextDivision:
    """Divides the text of one answer among its tokens, piece by piece, as far as tokens and characters agree.

    A character of several tokens stands with the last of them. Text that was held back stands with the first token of
    the piece that brings it. Tokens that write nothing, such as an end token, have no text. Where characters are not
    those that tokens write, they stand with the last token before one that agrees again. `start` is the number of
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

    def _taken(self, text: str, written: Sequence[str]) -> list[tuple[str, str]]:
        """What `text` has of each part that was written, and what of it must still come."""
        place, is_held = 0, False
        found, lost = list[tuple[str, str]](), 0  # characters of the parts since the last that was found
        for part in written:
            own, share, held = part, "", ""
            if not place and self._num_given == self._start and text and not text.startswith(" "):
                own = part.removeprefix(" ")  # SentencePiece drops the space in front of a text
            if is_held:
                held = part
            elif text.startswith(own, place):
                share = own
            elif len(text) - place < len(own) and own.startswith(text[place:]):
                share, is_held = text[place:], True
                held = own[len(share) :]
            elif lost and (skipped := text.find(part, place, place + _SKIPPED * lost + len(part)) - place) > 0:
                found[-1] = text[place : place + skipped], ""  # spelt otherwise than its tokens
                place, share = place + skipped, part
            lost = 0 if share else lost + len(part)
            place += len(share)
            found.append((share, held))
        return found

    def _written(self, token: TokenEvent) -> str:
        return token.text if token.data is None else self._decoder.decode(token.data)
