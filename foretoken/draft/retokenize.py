"""The committed text in a draft's own tokens, and a draft's text in the target's tokens.

`DraftText` follows the target token by token and always holds what a fresh encoding of the whole text would give, at a
cost that does not grow with the text: only the end of it, behind the last stable boundary, is encoded again.
`continuation` goes the other way with the committed end of the text in front, so that tokens merge over the border as
they do in the target's own texts.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from foretoken.text.detokenizer import Detokenizer
from foretoken.text.tokenizer import Tokenizer
from foretoken.text.vocabulary import Side

_MAX_TAIL = 512  # characters that are encoded again after a round; a longer tail looks for a boundary
_MIN_TAIL = 128  # characters kept behind a boundary, so that what comes can no longer change the tokens before it
_MAX_TRIES = 8
_NEAR = 16  # characters in front of a draft's text that are enough for tokens to merge as they should
# Stands in for the text before a boundary: some tokenizers treat the beginning of a text in another way.
_IN_FRONT = "a"


@dataclass(frozen=True)
class Ending:
    """The end of the committed text: whole characters, then the bytes `held` of one that is not whole.

    `begun` is false where no token wrote anything since the beginning or the last special token.
    """

    text: str
    held: bytes = b""
    begun: bool = True


class TextStream:
    """Target tokens in, text out, never half a character; `held` are the bytes of a character that is not whole yet."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._writes = tokenizer.token_bytes
        self._tokenizer = tokenizer
        self.restart()

    def restart(self) -> None:
        """Begin a new text."""
        self._detokenizer = Detokenizer(self._tokenizer) if self._writes is None else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.begun = False

    def push(self, token: int) -> str:
        """Take one token that is not special; the text that is whole now."""
        if self._writes is None:
            assert self._detokenizer is not None
            self.begun = True
            return self._detokenizer.push(token)
        written = self._writes.get(token, b"")
        if written and not self.begun:
            self.begun = True
            written = written[1:] if self._tokenizer.drops_first_space and written.startswith(b" ") else written
        return self._utf8.decode(written)

    @property
    def held(self) -> bytes:
        """Bytes taken in that are no text yet (as far as the tokenizer's tokens can be told apart)."""
        return self._utf8.getstate()[0]


class DraftText:
    """One request's committed text as the draft's tokens: `ids`, of which the first `num_settled` will never change.

    `to_draft` gives special tokens their counterparts; those without one stand for nothing. A special token ends the
    text before it and begins a new one.
    """

    def __init__(
        self,
        target: Tokenizer,
        draft: Side,
        to_draft: Mapping[int, int],
        max_tail: int = _MAX_TAIL,
        min_tail: int = _MIN_TAIL,
    ) -> None:
        self._target, self._draft, self._to_draft = target, draft, to_draft
        self._stream = TextStream(target)
        self._settled = list(draft.tokenizer.opening_ids)
        self._is_new = True
        self._tail = ""  # the end of the text, encoded again whenever it grows
        self._tail_is_inside = False  # whether text of the same run stands before the tail
        self._limit, self._max_tail, self._min_tail = max_tail, max_tail, min_tail
        self.ids = list(self._settled)

    @property
    def num_settled(self) -> int:
        """Tokens at the front of `ids` that no later text can change."""
        return len(self._settled)

    @property
    def ending(self) -> Ending:
        """What a draft must continue: the tail, and what is not in `ids` yet."""
        return Ending(self._tail, self._stream.held, self._stream.begun)

    @property
    def at_start(self) -> bool:
        """Whether no text stands between the last special token, or the beginning, and the end."""
        return not self._tail and not self._tail_is_inside

    def push(self, tokens: Iterable[int]) -> None:
        """Take committed target tokens."""
        for token in tokens:
            is_first, self._is_new = self._is_new, False
            if is_first and token == self._target.bos_token_id and self._settled:
                continue  # the draft's own beginning of text stands there already
            if token in self._to_draft:
                self._close_run(self._to_draft[token])
            elif token not in self._target.special_ids:
                self._tail += self._stream.push(token)
        encoded = self._encode(self._tail, self._tail_is_inside)
        self.ids = self._settled + encoded
        if len(self._tail) > self._limit:
            self._settle(encoded)

    def _close_run(self, special: int) -> None:
        self._settled = [*self._settled, *self._encode(self._tail, self._tail_is_inside), special]
        self._tail, self._tail_is_inside, self._limit = "", False, self._max_tail
        self._stream.restart()

    def _settle(self, encoded: list[int]) -> None:
        """Move the boundary to a place where the text before and after it encodes on its own as it does together."""
        tries = 0
        for place in range(len(self._tail) - self._min_tail, 0, -1):
            if not self._tail[place].isspace() or self._tail[place - 1].isspace():
                continue
            before = self._encode(self._tail[:place], self._tail_is_inside)
            after = self._encode(self._tail[place:], inside=True)
            if before + after == encoded:
                self._settled = self._settled + before
                self._tail, self._tail_is_inside, self._limit = self._tail[place:], True, self._max_tail
                return
            tries += 1
            if tries == _MAX_TRIES:
                break
        self._limit = 2 * len(self._tail)  # no boundary in sight: do not search after every round

    def _encode(self, text: str, inside: bool) -> list[int]:
        """Draft tokens of a piece of text that stands at the beginning of a text or `inside` one."""
        if not text:
            return []
        front = _IN_FRONT if inside else ""
        ids = self._draft.tokenizer.encode(front + text, add_special_tokens=False)
        if inside:
            ids = ids[len(self._draft.tokenizer.encode(front, add_special_tokens=False)) :]
        return [token for token in ids if token < self._draft.num_columns]


def draft_writes(draft: Tokenizer, before: list[int], drafted: list[int], at_start: bool) -> str:
    """The text that `drafted` adds behind the draft's committed tokens `before`, up to the last whole character."""
    writes = draft.token_bytes
    if writes is None:
        # Only some of the past: the decoder needs to know what a token stands behind, not how the text began.
        context = before[-8:]
        known, both = draft.decode(context), draft.decode([*context, *drafted])
        return both[len(known) :] if both.startswith(known) else ""
    written = b"".join(writes.get(token, b"") for token in drafted)
    if at_start and draft.drops_first_space:
        written = written.removeprefix(b" ")
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(written)
    return text.partition("\ufffd")[0]


def continuation(target: Side, spelling: Mapping[bytes, int] | None, ending: Ending, text: str) -> list[int]:
    """Target tokens that continue the committed tokens as `text` continues the whole characters of `ending`.

    Where a character is not whole, `text` begins with it. `spelling` gives the id that writes given bytes; None for
    tokenizers whose tokens have no bytes of their own. Empty where the two do not fit together.
    """
    aligned: list[int] = []
    for front in (ending.text, ending.text[-_NEAR:]):  # one strange character far back must not silence the draft
        ids = target.tokenizer.encode(front + text, add_special_tokens=False)
        aligned = (
            _behind_tokens(target, ids, front)
            if spelling is None
            else _behind_bytes(target, spelling, ids, replace(ending, text=front), text)
        )
        if aligned:
            break
    outside = next((place for place, token in enumerate(aligned) if token >= target.num_columns), len(aligned))
    return aligned[:outside]


def _behind_tokens(target: Side, ids: list[int], front: str) -> list[int]:
    """What stands behind the tokens of `front` in `ids`; nothing if these begin in another way."""
    known = target.tokenizer.encode(front, add_special_tokens=False)
    return ids[len(known) :] if ids[: len(known)] == known else []


def _behind_bytes(target: Side, spelling: Mapping[bytes, int], ids: list[int], ending: Ending, text: str) -> list[int]:
    """What stands in `ids` behind the bytes of `ending`."""
    writes = target.tokenizer.token_bytes
    assert writes is not None
    pieces = [writes.get(token, b"") for token in ids]
    whole, expected, committed = b"".join(pieces), (ending.text + text).encode(), ending.text.encode() + ending.held
    extra = len(whole) - len(expected)  # SentencePiece puts a space in front of every text
    if extra not in (0, 1) or whole[extra:] != expected or not expected.startswith(committed):
        return []
    border, place = len(committed) + extra if ending.begun else 0, 0
    for index, piece in enumerate(pieces):
        if place >= border:
            return ids[index:]
        place += len(piece)
        if place > border:  # a token over the border: the target wrote its beginning in another way
            fragment = _spell(piece[border - place :], spelling)
            return [] if fragment is None else [*fragment, *ids[index + 1 :]]
    return []


def _spell(fragment: bytes, spelling: Mapping[bytes, int]) -> list[int] | None:
    """Tokens that write `fragment`, the longest possible first; None where no token begins with the next byte."""
    found: list[int] = []
    while fragment:
        length = next((n for n in range(len(fragment), 0, -1) if fragment[:n] in spelling), None)
        if length is None:
            return None
        found.append(spelling[fragment[:length]])
        fragment = fragment[length:]
    return found
