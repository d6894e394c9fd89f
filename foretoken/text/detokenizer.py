"""From token ids back to text, one id after the other: a character comes when its last token does."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from foretoken.text.token_bytes import BYTE_TOKEN, byte_level
from foretoken.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 32  # no character needs as many tokens; a stream of broken bytes must not grow the window for ever


class Detokenizer:
    """Turns a stream of token ids into text that never has to be taken back.

    What `push` and `flush` return, joined, equals `Tokenizer.decode` of all ids, special tokens left out or, with
    `has_specials`, as they are spelt. Where the ids continue a text whose ids are `before`, it is what they add to that
    text: a decoder that drops the space in front of a text keeps theirs. The cost of a token does not grow with the
    text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), has_specials: bool = False) -> None:
        self._tokenizer, self._has_specials = tokenizer, has_specials
        is_byte_level = tokenizer.decoder.get("type") == "ByteLevel"
        self._stream = _ByteLevelStream(tokenizer) if is_byte_level else _WindowStream(tokenizer, before, has_specials)

    def push(self, token_id: int) -> str:
        """Take one id; return the text that is certain now, often the token's own, never half a character."""
        if token_id in self._tokenizer.special_ids and not self._has_specials:
            return ""
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._stream.push(token_id, token)

    def flush(self) -> str:
        """Return what was held back: the text is over."""
        return self._stream.flush()


class _ByteLevelStream:
    """Tokens are bytes: an incremental UTF-8 decoder knows by itself when a character is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._literal = tokenizer.literal_ids | tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:
        return self._utf8.decode(token.encode() if token_id in self._literal else byte_level(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: decode the new tokens behind the last settled one, and give out what comes after that one.

    The settled token in front carries what the decoder needs to know of the past: whether a leading space stays. Runs
    of byte tokens are held to their end, because one invalid byte changes how the decoder writes the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], has_specials: bool) -> None:
        self._tokenizer, self._has_specials = tokenizer, has_specials
        self._settled = self._last_word(before)
        self._settled_text = self._decoded(self._settled)
        self._held: list[int] = []
        self._in_bytes = False
        described = json.dumps(dict(tokenizer.decoder))
        self._has_bytes = "ByteFallback" in described
        self._may_split = not tokenizer.decoder or "ByteLevel" in described

    def push(self, token_id: int, token: str) -> str:
        is_byte = self._has_bytes and BYTE_TOKEN.fullmatch(token) is not None
        if is_byte:
            self._in_bytes = True
            self._held.append(token_id)
            return ""
        # The run of bytes is over: what it spells is certain even if the new token is not.
        done = self._release(certain=True) if self._in_bytes else ""
        self._in_bytes = False
        self._held.append(token_id)
        return done + self._release(certain=False)

    def flush(self) -> str:
        return self._release(certain=True)

    def _last_word(self, before: Sequence[int]) -> list[int]:
        """The last token of a text that can be settled by itself, which a part of a character cannot; none behind a
        special token, where a decoder begins a text of its own.
        """
        for token_id in reversed(before[-_MAX_HELD:]):
            token = self._tokenizer.token(token_id)
            if token is None or token_id in self._tokenizer.special_ids:
                break
            if BYTE_TOKEN.fullmatch(token) is None or int(token[3:5], 16) < 0x80:
                return [] if self._tokenizer.decode([token_id]).endswith(_REPLACEMENT) else [token_id]
        return []

    def _release(self, certain: bool) -> str:
        if not self._held:
            return ""
        text = self._decoded(self._settled + self._held)
        half = text.endswith(_REPLACEMENT) or text == self._settled_text
        if half and self._may_split and not certain and len(self._held) < _MAX_HELD:
            return ""
        new = text[len(self._settled_text) :]
        self._settled = self._held[-1:]
        self._held = []
        self._settled_text = self._decoded(self._settled)
        return new

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, has_specials=self._has_specials)
