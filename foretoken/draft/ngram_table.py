"""An n-gram table: the token that a target most often writes after one, two or three given ones, and how often.

Counted once from the target's own answers (`train.ngrams`), as `llama.cpp`'s static lookup cache is from a text. The
longest context that the table knows decides (back-off: Katz 1987); contexts are kept as 32 bits of a hash, since a
wrong draft token costs a row of the target and nothing else.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from foretoken.errors import CheckpointError, MismatchError, StorageError
from foretoken.files import replace_bytes
from foretoken.text.tokenizer import Tokenizer

MAX_CONTEXT = 3  # tokens; with a fourth the table is a third larger and no draft better (LOG.md, 2026-11-28)
_FORMAT = "foretoken n-gram table"
_PACKAGED = Path(__file__).parent / "ngrams"
_MULTIPLIER, _MASK, _SHIFT = 0x9E3779B97F4A7C15, (1 << 64) - 1, 29
_SCALE = 255  # chances are kept in a byte
_MAX_TOKEN = (1 << 32) - 1  # tokens are kept in 32 bits


@dataclass(frozen=True, eq=False)
class NgramTable:
    """For contexts of 1, 2, ... tokens, each by its sorted `keys` (`context_keys`): `tokens` and `chances` (of 255).

    `vocabulary` is the digest of the tokenizer whose ids these are (`vocabulary_digest`).
    """

    keys: tuple[array[int], ...]
    tokens: tuple[array[int], ...]
    chances: tuple[bytes, ...]
    vocabulary: str

    def after(self, text: Sequence[int]) -> tuple[int, float] | None:
        """The likeliest token after `text` and its chance, by the longest context that is known; None: none is."""
        for length in range(min(len(self.keys), len(text)), 0, -1):
            key, keys = _key(text[-length:]), self.keys[length - 1]
            place = bisect_left(keys, key)
            if place < len(keys) and keys[place] == key:
                return self.tokens[length - 1][place], self.chances[length - 1][place] / _SCALE
        return None

    @property
    def num_entries(self) -> int:
        """Contexts that it knows."""
        return sum(map(len, self.keys))

    @property
    def num_bytes(self) -> int:
        """Memory of the entries."""
        return sum(
            len(keys) * keys.itemsize + len(tokens) * tokens.itemsize + len(chances)
            for keys, tokens, chances in zip(self.keys, self.tokens, self.chances, strict=True)
        )


def context_keys(columns: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The 64-bit hashes of contexts whose tokens stand in `columns` [length][n], oldest first: [n].

    A table keeps their upper halves.
    """
    key = np.full(len(columns[0]), len(columns), dtype=np.uint64)
    for column in columns:
        key = (key ^ column) * np.uint64(_MULTIPLIER)
        key ^= key >> np.uint64(_SHIFT)
    return key


def _key(context: Sequence[int]) -> int:
    """The upper half of `context_keys`, of one context."""
    key = len(context)
    for token in context:
        key = ((key ^ token) * _MULTIPLIER) & _MASK
        key ^= key >> _SHIFT
    return key >> 32


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Names the assignment of ids to tokens."""
    spelt = sorted((token_id, token) for token, token_id in tokenizer.vocabulary.items())
    return hashlib.sha256("\0".join(f"{token_id} {token}" for token_id, token in spelt).encode()).hexdigest()


def save_table(table: NgramTable, path: Path, note: Mapping[str, str]) -> None:
    """Write a table; `note` says what it was counted from.

    Raises:
        StorageError: the file cannot be written.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for length, (keys, tokens, chances) in enumerate(zip(table.keys, table.tokens, table.chances, strict=True), 1):
        arrays[f"keys.{length}"] = np.array(keys, dtype=np.uint32)
        arrays[f"tokens.{length}"] = np.array(tokens, dtype=np.min_scalar_type(max(tokens, default=0)))
        arrays[f"chances.{length}"] = np.frombuffer(chances, dtype=np.uint8)
    # safetensors' own writer replaces links and devices, and lets nobody but the user read the file
    replace_bytes("out", path, save(arrays, {"format": _FORMAT, "vocabulary": table.vocabulary, **note}))


def load_table(path: Path) -> NgramTable:
    """What `save_table` wrote.

    Raises:
        StorageError: the file cannot be read.
        CheckpointError: it holds something else.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is no n-gram table; make one with `foretoken train ngrams`")
            num_lengths = sum(name.startswith("keys.") for name in file.keys())  # noqa: SIM118 - the file has no iterator
            columns = [
                [file.get_tensor(f"{name}.{length}") for name in ("keys", "tokens", "chances")]
                for length in range(1, num_lengths + 1)
            ]
    except OSError as error:
        raise StorageError(f"ngram_table: cannot read {path}: {error}") from error
    except (SafetensorError, TypeError) as error:  # a TypeError is a number format that numpy does not have
        raise CheckpointError(f"{path} is no n-gram table ({error}); make one with `foretoken train ngrams`") from error
    for keys, tokens, chances in columns:
        are_words = keys.dtype == np.uint32 and tokens.dtype.kind == "u" and chances.dtype == np.uint8
        if not (are_words and keys.ndim == 1 and keys.shape == tokens.shape == chances.shape):
            raise CheckpointError(f"{path} is a damaged n-gram table: its columns differ in length or type")
        if int(tokens.max(initial=0)) > _MAX_TOKEN:
            raise CheckpointError(f"{path} is a damaged n-gram table: token {tokens.max()} is none of any vocabulary")
        if not bool((keys[1:] > keys[:-1]).all()):  # a context is searched for by halves
            raise CheckpointError(f"{path} is a damaged n-gram table: its keys do not ascend")
    return table_of(columns, metadata.get("vocabulary", ""))


def table_of(columns: Sequence[Sequence[NDArray[np.generic]]], vocabulary: str) -> NgramTable:
    """A table from keys, tokens and chances in 255ths, sorted by key, for contexts of 1, 2, ... tokens."""
    return NgramTable(
        keys=tuple(_words(keys) for keys, _, _ in columns),
        tokens=tuple(_words(tokens) for _, tokens, _ in columns),
        chances=tuple(chances.astype(np.uint8).tobytes() for _, _, chances in columns),
        vocabulary=vocabulary,
    )


def _words(values: NDArray[np.generic]) -> array[int]:
    return array("I", values.astype(np.uint32).tobytes())


def table_for(tokenizer: Tokenizer, given: Path | None) -> NgramTable | None:
    """The table in the file `given`, or the packaged one of this tokenizer; None where the package has none.

    Raises:
        StorageError, CheckpointError: see `load_table`.
        MismatchError: the file was made for another tokenizer.
    """
    if given is None:
        own = vocabulary_digest(tokenizer)
        tables = map(_packaged, sorted(_PACKAGED.glob("*.safetensors")))
        return next((table for table in tables if table.vocabulary == own), None)
    table = load_table(given)
    if table.vocabulary != vocabulary_digest(tokenizer):
        raise MismatchError(
            f"{given}: the n-gram table was counted with another tokenizer than that of {tokenizer.folder}: the same "
            "numbers are other texts; make one of this target's answers with `foretoken train ngrams`"
        )
    return table


@cache
def _packaged(path: Path) -> NgramTable:
    return load_table(path)
