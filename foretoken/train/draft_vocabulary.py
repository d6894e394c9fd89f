"""A head's own vocabulary, counted from the text that the target is to write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.heads.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class CountedVocabulary:
    """`coverage` is the share of the counted text that the vocabulary can write."""

    vocabulary: DraftVocabulary
    coverage: float


def most_frequent(counts: Tensor, size: int | None, always: Iterable[int] = ()) -> CountedVocabulary:
    """The `size` most frequent tokens of `counts` [V] (None: all), those of `always` (ends of text, special tokens)
    among them.

    Raises:
        ConfigError: fewer than `always`, or more than the target has.
    """
    total, kept = len(counts), sorted(set(always))
    if size is None or size == total:
        return CountedVocabulary(DraftVocabulary.whole(total), 1.0)
    if not max(1, len(kept)) <= size <= total:
        raise ConfigError(
            "draft_vocab_size", size, f"must lie between {max(1, len(kept))} (special tokens) and the target's {total}"
        )
    rank = counts.double()
    rank[kept] = float("inf")
    ids = torch.argsort(rank, descending=True, stable=True)[:size].sort().values
    vocabulary = DraftVocabulary(ids, total)
    return CountedVocabulary(vocabulary, coverage(counts, vocabulary))


def coverage(counts: Tensor, vocabulary: DraftVocabulary) -> float:
    """The share of the counted text [V] that `vocabulary` can write."""
    return float(counts[vocabulary.ids].sum() / counts.sum().clamp(min=1))
