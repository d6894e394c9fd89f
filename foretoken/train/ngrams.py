"""Counts the n-gram table of a target (`draft.ngram_table`) from its own answers: seconds of one core.

Contexts are the last one to three tokens, those of the prompt's end included. An entry is kept where its context was
seen often enough, where its token is likely enough to be drafted, and where the shorter contexts do not say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.draft.ngram_table import MAX_CONTEXT, NgramTable, context_keys, table_of, vocabulary_digest
from foretoken.errors import InputError
from foretoken.text.tokenizer import load_tokenizer
from foretoken.train.answers import answers_of

_MIN_COUNT = 3  # times that a context stands in the answers
_MIN_CHANCE = 0.1  # below it no draft token is made, whatever stands before it
_SAME_CHANCE = 0.15  # a longer context that differs from the shorter ones by less says nothing new
_DOUBT = 0.5  # of a place: the chance of n in m is (n - 1/2) / (m + 1/2)
_BETWEEN = np.uint64((1 << 64) - 1)  # stands between answers; no token


@dataclass(frozen=True)
class _Counts:
    """For each context of one length, sorted by key: its likeliest token, its chance, and one place behind it."""

    keys: NDArray[np.uint64]
    tokens: NDArray[np.uint64]
    chances: NDArray[np.float64]
    places: NDArray[np.int64]

    def only(self, kept: NDArray[np.bool_]) -> _Counts:
        return _Counts(self.keys[kept], self.tokens[kept], self.chances[kept], self.places[kept])


def count_ngrams(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: str) -> NgramTable:
    """The table of prompts with their answers; `vocabulary` names the tokenizer (`ngram_table.vocabulary_digest`)."""
    text, answered = _joined(pairs)
    shorter: list[_Counts] = []
    for length in range(1, MAX_CONTEXT + 1):
        found = _counted(text, answered, length)
        said, chances = _said(shorter, text, found.places)
        says_new = (said != found.tokens) | (np.abs(chances - found.chances) > _SAME_CHANCE)
        shorter.append(found.only(says_new & (np.maximum(found.chances, chances) >= _MIN_CHANCE)))
    return table_of(list(map(_columns, shorter)), vocabulary)


def table_of_answers(paths: Sequence[Path], folder: Path) -> tuple[NgramTable, dict[str, Any]]:
    """The table of the answers in some files, by the target in `folder`, and a note on what it was counted from.

    Raises:
        StorageError, InputError: see `read_answers`; answers of which nothing stands often enough.
        MismatchError: another target's answers.
    """
    files = [answers_of(path, folder) for path in paths]
    pairs = [pair for file in files for pair in file.pairs]
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise InputError("target", str(folder), "has no tokenizer, by which a table knows its targets; add its files")
    table = count_ngrams(pairs, vocabulary_digest(tokenizer))
    num_tokens = sum(len(answer) for _, answer in pairs)
    if not table.num_entries:
        remedy = f"hold {num_tokens:,} tokens, in which no token stands {_MIN_COUNT} times; write more answers"
        raise InputError("answers", ", ".join(map(str, paths)), remedy)
    note = {"target": files[0].header["target"], "answers": len(pairs), "answer_tokens": num_tokens}
    return table, note


def _joined(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The answers, each behind the last tokens of its prompt, and which tokens are an answer's."""
    between = [_BETWEEN] * MAX_CONTEXT
    text, answered = [np.array(between)], [np.zeros(MAX_CONTEXT, dtype=np.bool_)]
    for prompt, answer in pairs:
        before = prompt[-MAX_CONTEXT:]
        text.append(np.array([*before, *answer, *between], dtype=np.uint64))
        answered.append(np.repeat([False, True, False], [len(before), len(answer), MAX_CONTEXT]))
    return np.concatenate(text), np.concatenate(answered)


def _counted(text: NDArray[np.uint64], answered: NDArray[np.bool_], length: int) -> _Counts:
    """All contexts of `length` tokens that were seen often enough before a token of an answer."""
    columns, following = [text[start : len(text) - length + start] for start in range(length)], text[length:]
    inside = np.logical_and.reduce([answered[length:], *(column != _BETWEEN for column in columns)])
    keys, tokens = context_keys([column[inside] for column in columns]), following[inside]
    order = np.lexsort((tokens, keys))
    keys, tokens, places = keys[order], tokens[order], np.flatnonzero(inside)[order] + length
    pairs = _starts(keys, tokens)  # of each context and token
    counts, contexts = np.diff(pairs, append=len(keys)), _starts(keys[pairs])
    seen, most = np.add.reduceat(counts, contexts), np.maximum.reduceat(counts, contexts)
    context_of = np.repeat(np.arange(len(contexts)), np.diff(contexts, append=len(pairs)))
    leading = np.flatnonzero(counts == most[context_of])
    best = pairs[leading[_starts(context_of[leading])]]
    chances = (most - _DOUBT) / (seen + _DOUBT)
    return _Counts(keys[best], tokens[best], chances, places[best]).only(seen >= _MIN_COUNT)


def _starts(*columns: NDArray[Any]) -> NDArray[np.int64]:
    """Where runs of equal rows begin."""
    changes = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(np.concatenate([[len(columns[0]) > 0], changes]))


def _said(
    shorter: Sequence[_Counts], text: NDArray[np.uint64], places: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """What the tables of shorter contexts say at `places`: token and chance, by the longest that is known."""
    tokens, chances = np.full(len(places), _BETWEEN), np.zeros(len(places))
    for length, table in enumerate(shorter, start=1):  # a longer one overwrites
        keys = context_keys([text[places - length + start] for start in range(length)])
        at = np.minimum(np.searchsorted(table.keys, keys), max(0, len(table.keys) - 1))
        known = table.keys[at] == keys if len(table.keys) else np.zeros(len(keys), dtype=np.bool_)
        tokens[known], chances[known] = table.tokens[at[known]], table.chances[at[known]]
    return tokens, chances


def _columns(counts: _Counts) -> tuple[NDArray[np.generic], ...]:
    """Keys, tokens and chances as a table keeps them; of contexts with the same upper half of the hash one is left."""
    keys, first = np.unique(counts.keys >> np.uint64(32), return_index=True)
    return keys, counts.tokens[first], np.round(255 * counts.chances[first])
