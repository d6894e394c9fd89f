"""The two libraries that encode and decode underneath a `Tokenizer`: `tokenizers` in Rust, and transformers in Python.

What they raise becomes a `CheckpointError` that names the file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import tokenizers

from foretoken.errors import CheckpointError
from foretoken.model.fields import shown
from foretoken.text.token_bytes import literal_ids
from foretoken.text.token_count import TokenCounter

_LONG_CHARS = 2048  # a text of milliseconds

_Foreign: TypeAlias = Any  # objects of transformers, which has no types


class TextEncoder(Protocol):
    """What is asked of the library underneath."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens that stand in the text are read as such."""

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a special token."""

    def min_num_tokens(self, text: str, enough: int, is_plain: bool) -> int:
        """A lower bound of the number of tokens, looked for up to `enough`; 0 where nothing is certain."""

    def decode(self, ids: Sequence[int], has_specials: bool) -> str:
        """The text of ids; unknown ones give nothing."""

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id."""

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, added tokens included."""

    def special_ids(self) -> frozenset[int]:
        """Tokens that are left out of texts."""

    def literal_ids(self) -> frozenset[int]:
        """Tokens that are written as they are spelt, though the decoder would read them as bytes."""

    def decoder(self) -> dict[str, Any]:
        """The decoder as `tokenizer.json` describes it; empty if unknown."""


def rust_encoder(inner: tokenizers.Tokenizer, where: str) -> TextEncoder:
    """Return what encodes with the Rust library; `where` names the file in errors."""
    return _Fast(inner, where)


def transformers_encoder(inner: _Foreign, where: str) -> TextEncoder:
    """Return what encodes with a tokenizer of transformers: with the Rust one inside, if it has one."""
    fast = getattr(inner, "backend_tokenizer", None)
    return _Fast(fast, where) if isinstance(fast, tokenizers.Tokenizer) else _Slow(inner)


@contextmanager
def broken_means(complaint: str, *mistakes: type[Exception]) -> Iterator[None]:
    """Turn what the library underneath raises into a `CheckpointError`, but `mistakes`, which are the caller's."""
    passed: tuple[type[Exception], ...] = (CheckpointError, *mistakes)
    try:
        yield
    except passed:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{complaint} ({error}); download it again") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise CheckpointError(f"{complaint} (the library failed: {error}); download it again") from error


def is_panic(error: BaseException) -> bool:
    """Whether the library's Rust code panicked: a BaseException whose class can be imported from nowhere."""
    return type(error).__name__ == "PanicException"


class _Fast:
    """The Rust library; `where` names the file in errors."""

    def __init__(self, inner: tokenizers.Tokenizer, where: str) -> None:
        self._inner, self._where = inner, where
        inner.no_truncation()  # some files ask for it; a prompt must never be shortened in silence
        inner.no_padding()
        self._plain: tokenizers.Tokenizer | None = None  # a copy that reads special tokens as text
        self._counter: TokenCounter | None = None
        added = inner.get_added_tokens_decoder()
        self._literal = literal_ids(
            self.decoder(), {number: token.content for number, token in added.items() if not token.special}
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._ids(self._inner, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        return self._ids(self._plain_copy(), text, False)

    def min_num_tokens(self, text: str, enough: int, is_plain: bool) -> int:
        if self._counter is None:
            self._counter = TokenCounter(self._inner)
        inner = self._plain_copy() if is_plain else self._inner
        with broken_means(f"{self._where} cannot encode {shown(text)}", TypeError):
            return self._counter.minimum(inner, text, enough)

    def _plain_copy(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            plain = tokenizers.Tokenizer.from_str(self._inner.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def _ids(self, inner: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        with broken_means(f"{self._where} cannot encode {shown(text)}", TypeError):
            if len(text) > _LONG_CHARS:  # `encode` lets no other thread of Python run; a batch does
                found = inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            else:
                found = inner.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], has_specials: bool) -> str:
        with broken_means(f"{self._where} cannot decode some tokens", TypeError, OverflowError):
            if self._literal.isdisjoint(ids):
                text: str = self._inner.decode(list(ids), skip_special_tokens=not has_specials)
                return text
            parts = [
                "".join(self.token(token_id) or "" for token_id in run)
                if is_literal
                else self._inner.decode(list(run), skip_special_tokens=not has_specials)
                for is_literal, run in itertools.groupby(ids, self._literal.__contains__)
            ]
        return "".join(parts)

    def token(self, token_id: int) -> str | None:
        token: str | None = self._inner.id_to_token(token_id)
        return token

    def vocabulary(self) -> dict[str, int]:
        return dict(self._inner.get_vocab(with_added_tokens=True))

    def special_ids(self) -> frozenset[int]:
        return frozenset(
            token_id for token_id, token in self._inner.get_added_tokens_decoder().items() if token.special
        )

    def literal_ids(self) -> frozenset[int]:
        return self._literal

    def decoder(self) -> dict[str, Any]:
        if self._inner.decoder is None:
            return {}
        # What it is pickled as. Writing the whole tokenizer would list every id up to the largest, whatever that is.
        described: dict[str, Any] = json.loads(self._inner.decoder.__getstate__())
        return described


class _Slow:
    """A tokenizer that transformers implements in Python."""

    def __init__(self, inner: _Foreign) -> None:
        self._inner = inner

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def encode_plain(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False, split_special_tokens=True))

    def min_num_tokens(self, text: str, enough: int, is_plain: bool) -> int:  # noqa: ARG002 - the protocol's
        return 0

    def decode(self, ids: Sequence[int], has_specials: bool) -> str:
        known = [token_id for token_id in ids if self.token(token_id) is not None]
        skips = not has_specials
        return str(self._inner.decode(known, skip_special_tokens=skips, clean_up_tokenization_spaces=False))

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._inner):
            return None
        token: str | None = self._inner.convert_ids_to_tokens(token_id)
        return token

    def vocabulary(self) -> dict[str, int]:
        return dict(self._inner.get_vocab())

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._inner.all_special_ids)

    def literal_ids(self) -> frozenset[int]:
        return frozenset()

    def decoder(self) -> dict[str, Any]:
        return {}
