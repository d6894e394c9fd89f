"""What must not come: token sequences that must not be completed, and texts that must not appear in the answer.

A text is banned by its bytes, whatever tokens spell it: a token may not follow that contains it, or that completes it
behind the end of the answer. A list of token ids is banned as that sequence only, in prompt and answer, as in
transformers.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.text.tokenizer import Tokenizer

_BORDER = b"\xff"  # no text has this byte
_KNOWN_TEXTS = 8_192  # of which the tokens are remembered: requests often come with the same long list


class TokenSequences:
    """Sequences of two or more tokens that must not be completed, by what stands in front of their last token."""

    def __init__(self, words: Collection[tuple[int, ...]], prompt_ids: Sequence[int]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}  # what comes before -> the tokens that would complete a word
        for word in words:
            if len(word) > 1:
                self._last.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: tuple[int, ...] = ()  # as much of the text as a word can reach back
        self.commit(prompt_ids)

    def after(self, path: tuple[int, ...]) -> list[int]:
        """Tokens that would complete a sequence behind the committed text and `path`."""
        text = self._tail + path
        return [
            token for length in self._lengths if length <= len(text) for token in self._last.get(text[-length:], ())
        ]

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by emitted tokens."""
        if self._lengths:
            self._tail = (*self._tail, *tokens[-self._lengths[-1] :])[-self._lengths[-1] :]


class TokenTexts:
    """The bytes that tokens of a vocabulary write (special ones none), in an order that finds the tokens of a text."""

    def __init__(self, written: Mapping[int, bytes]) -> None:
        self.written = written
        pairs = sorted((text, token) for token, text in written.items() if text)
        self._texts, self._ids = [text for text, _ in pairs], [token for _, token in pairs]
        self._all = _BORDER + _BORDER.join(self._texts)
        self._starts: list[int] = []  # of each text in `_all`
        place = 1
        for text in self._texts:
            self._starts.append(place)
            place += len(text) + 1
        self.containing = functools.lru_cache(_KNOWN_TEXTS)(self._containing)

    def _containing(self, text: bytes) -> list[int]:
        found, place = set[int](), self._all.find(text)
        while place >= 0:
            number = bisect_right(self._starts, place) - 1
            found.add(self._ids[number])
            place = self._all.find(text, self._starts[number] + len(self._texts[number]))
        return sorted(found)

    def beginning(self, text: bytes) -> list[int]:
        """Tokens that begin with `text`."""
        behind = text[:-1] + bytes([text[-1] + 1])  # the first text that sorts behind all of them
        return self._ids[bisect_left(self._texts, text) : bisect_left(self._texts, behind)]


class BannedTexts:
    """Texts that must not appear in one answer, and the end of what is written of it."""

    def __init__(self, texts: Collection[bytes], tokens: TokenTexts) -> None:
        self._tokens, self._texts = tokens, sorted(set(texts))
        self.single_ids = sorted({token for text in self._texts for token in tokens.containing(text)})
        self._completing: dict[bytes, Tensor] = {}  # by the rest that is missing: the tokens that begin with it
        self._reach = max((len(text) - 1 for text in self._texts), default=0)
        self._tail = b""

    def after(self, path: Sequence[int]) -> list[Tensor]:
        """Tokens, in parts, that would complete a text begun in the answer and `path`."""
        tail, rests = self._append(path), set[bytes]()
        for place in range(len(tail)):
            begun = tail[place:]
            first, last = bisect_right(self._texts, begun), bisect_left(self._texts, begun + _BORDER)
            rests |= {text[len(begun) :] for text in self._texts[first:last]}
        return [self._beginning(rest) for rest in sorted(rests)]

    def commit(self, tokens: Sequence[int]) -> None:
        """Move on by emitted tokens."""
        self._tail = self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> bytes:
        if not self._reach:
            return b""
        return (self._tail + b"".join(self._tokens.written.get(token, b"") for token in tokens))[-self._reach :]

    def _beginning(self, rest: bytes) -> Tensor:
        if rest not in self._completing:
            self._completing[rest] = torch.tensor(self._tokens.beginning(rest), dtype=torch.int64)
        return self._completing[rest]


_known: WeakKeyDictionary[Tokenizer, dict[int, TokenTexts | None]] = WeakKeyDictionary()


def token_texts(tokenizer: Tokenizer, vocab_size: int) -> TokenTexts | None:
    """What the columns of a model write; None where the tokenizer does not say. Computed once for each tokenizer."""
    by_size = _known.setdefault(tokenizer, {})
    if vocab_size not in by_size:
        written, specials = tokenizer.token_bytes, tokenizer.special_ids
        plain = {i: text for i, text in (written or {}).items() if i < vocab_size and i not in specials}
        by_size[vocab_size] = None if written is None else TokenTexts(plain)
    return by_size[vocab_size]


def split_words(
    words: Sequence[str | Sequence[int]], vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[set[tuple[int, ...]], BannedTexts | None]:
    """The token sequences and the texts that bad words stand for.

    Where the tokenizer does not say what its tokens write, a text stands for the tokens that it and " " + itself are
    encoded to; where it has special tokens in it, for these too.

    Raises:
        InputError: a token outside the vocabulary, a text where there is no tokenizer, or one that encodes to nothing.
    """
    sequences: set[tuple[int, ...]] = set()
    texts: list[bytes] = []
    known = None
    if tokenizer is not None and any(isinstance(word, str) for word in words):
        known = token_texts(tokenizer, vocab_size)
    for word in words:
        if not isinstance(word, str):
            sequences.add(_checked(word, word, vocab_size))
            continue
        if tokenizer is None:
            raise InputError("bad_words", word, "the model has no tokenizer; give lists of token ids")
        spellings = [
            _checked(tokenizer.encode(text, add_special_tokens=False), word, vocab_size) for text in (word, " " + word)
        ]
        if known is not None:
            texts.append(word.encode())
            spellings = [ids for ids in spellings if not tokenizer.special_ids.isdisjoint(ids)]
        elif not all(spellings):
            raise InputError("bad_words", word, "encodes to no token at all; leave it out")
        sequences |= set(spellings)
    return sequences, None if known is None else BannedTexts(texts, known)


def _checked(ids: Sequence[int], word: object, vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError("bad_words", word, f"token ids are whole numbers from 0 to {vocab_size - 1}")
    return tuple(ids)
