"""A draft model in the trainer of heads: it drafts from the text alone, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import Head, HeadBatch, Place
from foretoken.heads.vocabulary import DraftVocabulary
from foretoken.model.decoder import Decoder
from foretoken.model.interface import SharedWeights
from foretoken.train.evaluate import logits_of


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


class DraftStudent(nn.Module):
    """A small model that learns the target's distribution at every position.

    In training there is one place: what it predicts further on, behind the text's own tokens, is the same distribution
    at a later row. In evaluation those rows are given as later places, so that runs of draft tokens are measured.
    """

    name = "draft_model"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder.requires_grad_(True)
        self.vocabulary = DraftVocabulary.whole(decoder.config.vocab_size)

    def hidden_layers(self) -> tuple[int, ...]:
        """It reads none."""
        return ()

    def places(self, batch: HeadBatch, target: SharedWeights, num_places: int, seed: int) -> Iterator[Place]:  # noqa: ARG002
        """See `Head`."""
        num_rows = batch.tokens.shape[1] - 1
        logits = logits_of(self.decoder, batch.tokens[:, :-1])  # [B * S, V]
        wanted = batch.wanted[:, 1:]  # [B, S]
        column = torch.arange(num_rows, device=wanted.device)
        for number in range(1 if self.training else num_places):
            rows = (wanted & (column >= number)).flatten().nonzero().squeeze(1)  # [R]
            yield Place(number, logits[rows], rows)


Student = Head | DraftStudent
