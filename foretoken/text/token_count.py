"""How many tokens a long text has at least, without the time that it takes to encode all of it."""

from __future__ import annotations

import json
import math
from typing import Any

import tokenizers
from tokenizers import models

from foretoken.text.token_bytes import byte_level

# Few texts have so many characters for each token.
_CHARS_PER_TOKEN = 16
# NFC makes one character of up to four, with a quarter of their bytes or more.
_NFC_SHRINKS = 4.0
# Before the end of a beginning, what may be read otherwise once more text follows: an added token that is cut off, and
# words that look ahead, over a run of spaces for one.
_UNSETTLED_CHARS = 256
_UNSETTLED_WORDS = 8
# Steps before the model that leave no character out.
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})


class TokenCounter:
    """Lower bounds for one tokenizer. May be used from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        added = inner.get_added_tokens_decoder().values()
        self._unsettled = max([_UNSETTLED_CHARS, *(2 * len(token.content) for token in added)])
        steps = _parts(inner.pre_tokenizer)
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._unknown = _unknown_bytes(inner, self._is_byte_level)
        self._longest = self._shrinking = math.inf  # of a token, in bytes or characters; of a normalizer
        # Tokens that take the spaces beside them take any number of these.
        if _keeps_all(inner, steps) and not any(token.lstrip or token.rstrip for token in added):
            spelt = [*inner.get_vocab(with_added_tokens=False), *(token.content.encode() for token in added)]
            self._longest, self._shrinking = max(map(len, spelt), default=1), _shrinking(_parts(inner.normalizer))

    def minimum(self, inner: tokenizers.Tokenizer, text: str, enough: int) -> int:
        """A number of tokens that `text` has in any case; 0 where nothing is certain. It does not look for more than
        `enough`, nor at all at a text that may well be shorter. `inner`: the counter's tokenizer or a copy of it.
        """
        num_chars = enough * _CHARS_PER_TOKEN
        if len(text) <= num_chars:
            return 0
        by_length = self._of_length(text)
        return by_length if by_length > enough else max(by_length, self._of_beginning(inner, text[:num_chars]))

    def _of_length(self, text: str) -> int:
        """By the longest token; bytes that the vocabulary does not have are no part of any."""
        if math.isinf(self._longest) or (self._unknown and not self._is_byte_level):
            return 0
        size = len(text.encode().translate(None, self._unknown)) if self._is_byte_level else len(text)
        return math.ceil(size / self._longest / (1.0 if text.isascii() else self._shrinking))

    def _of_beginning(self, inner: tokenizers.Tokenizer, text: str) -> int:
        """By the tokens of a text's beginning that are the same whatever follows.

        Words are encoded each for itself. Those that end before the last character that is neither letter nor digit
        are the same but for a few of them.
        """
        end = len(text) - self._unsettled
        while end > 0 and text[end - 1].isalnum():
            end -= 1
        if end <= 0:
            return 0
        found = inner.encode_batch([text], add_special_tokens=False)[0]
        words = found.word_ids
        first_open = next((place for place, (_, stop) in enumerate(found.offsets) if stop > end), len(words))
        word = words[first_open] if first_open < len(words) else None
        if word is None:
            return 0
        return sum(1 for one in words[:first_open] if one is not None and one < word - _UNSETTLED_WORDS)


def _keeps_all(inner: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> bool:
    """Whether the tokens of a text spell every character of it whose bytes the vocabulary has."""
    is_kept = all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)
    return is_kept and isinstance(inner.model, models.BPE)


def _unknown_bytes(inner: tokenizers.Tokenizer, is_byte_level: bool) -> bytes:
    """The bytes that the vocabulary has no token for."""
    if is_byte_level:
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        return b"".join(byte_level(letter) for letter in letters if inner.token_to_id(letter) is None)
    has_bytes = getattr(inner.model, "byte_fallback", False)
    return bytes(byte for byte in range(256) if not has_bytes or inner.token_to_id(f"<0x{byte:02X}>") is None)


def _shrinking(steps: list[dict[str, Any]]) -> float:
    """How many characters of a text a normalizer makes one of, at most; infinite where that is not known."""
    most = 1.0
    for step in steps:
        pattern = step.get("pattern", {}).get("String")
        if step["type"] == "NFC":
            most *= _NFC_SHRINKS
        elif step["type"] == "Replace" and pattern and step["content"]:
            most *= max(1.0, len(pattern) / len(step["content"]))
        elif step["type"] != "Prepend":
            return math.inf
    return most


def _parts(component: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a normalizer or pre-tokenizer of the library
    """The steps of a component as `tokenizer.json` describes them."""
    if component is None:
        return []
    described: dict[str, Any] = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = described.get("normalizers") or described.get("pretokenizers") or [described]
    return steps if described["type"] == "Sequence" else [described]
