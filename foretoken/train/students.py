"""A draft model in the trainer of heads: it drafts from the text alone, one token at a time; and how many tokens a step
would emit with a head or a draft model, from its acceptance place by place along held-out text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.errors import ConfigError
from foretoken.heads.base import DraftVocabulary, Head, HeadBatch, Place
from foretoken.heads.losses import acceptance, same_argmax, target_logits
from foretoken.model.decoder import Decoder
from foretoken.model.interface import SharedWeights
from foretoken.train.evaluate import logits_of
from foretoken.train.frozen_target import FrozenTarget


def most_frequent(counts: Tensor, size: int | None, always: Iterable[int] = ()) -> DraftVocabulary:
    """The `size` most frequent tokens of `counts` [V] (None: all), those of `always` (ends of text, special tokens)
    among them.

    Raises:
        ConfigError: fewer than `always`, or more than the target has.
    """
    total, kept = len(counts), sorted(set(always))
    if size is None or size == total:
        return DraftVocabulary.whole(total)
    if not max(1, len(kept)) <= size <= total:
        remedy = f"must lie between {max(1, len(kept))} (special tokens) and the target's {total}"
        raise ConfigError("draft_vocab_size", size, remedy)
    rank = counts.double()
    rank[kept] = float("inf")
    return DraftVocabulary(torch.argsort(rank, descending=True, stable=True)[:size].sort().values, total)


def coverage(counts: Tensor, vocabulary: DraftVocabulary) -> float:
    """The share of the counted text [V] that `vocabulary` can write."""
    return float(counts[vocabulary.ids.to(counts.device)].sum() / counts.sum().clamp(min=1))


class DraftStudent(nn.Module):
    """A small model that learns the target's distribution at every position.

    In training there is one place: what it predicts further on, behind the text's own tokens, is the same distribution
    at a later row. In evaluation those rows are given as later places, so that runs of draft tokens are measured.
    """

    name = "draft_model"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder, self.config = decoder.requires_grad_(True), decoder.config
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


@dataclass(frozen=True)
class HeadAcceptance:
    """A head along real text, from every position at which it drafts all its places.

    `sampled[k]` is the mean of alpha = sum min(p, q) at place k, `greedy[k]` the share of equal argmax.
    `emitted_sampled` and `emitted_greedy` are 1 + sum_k prod_{i <= k} of these, by position and then averaged: tokens
    per step at temperature 1 and 0, if the text goes on as it does here.
    """

    num_positions: int
    sampled: tuple[float, ...]
    greedy: tuple[float, ...]
    emitted_sampled: float
    emitted_greedy: float


@torch.no_grad()
def measure_head(head: Student, target: FrozenTarget, batches: Iterable[HeadBatch], num_places: int) -> HeadAcceptance:
    """Acceptance of `num_places` places along `batches`, at most those that the head has."""
    sampled, greedy = [], []
    head.eval()
    for number, batch in enumerate(batches):
        alpha, match = _by_position(head, target, batch, num_places, seed=number)
        whole = ~alpha.isnan().any(0)
        sampled.append(alpha[:, whole])
        greedy.append(match[:, whole])
    head.train()
    alpha, match = torch.cat(sampled, 1), torch.cat(greedy, 1)  # [K, R]
    if not alpha.shape[1]:
        return HeadAcceptance(0, (), (), 1.0, 1.0)
    return HeadAcceptance(
        alpha.shape[1],
        tuple(alpha.mean(1).tolist()),
        tuple(match.mean(1).tolist()),
        1 + float(alpha.cumprod(0).sum(0).mean()),
        1 + float(match.cumprod(0).sum(0).mean()),
    )


def _by_position(
    head: Student, target: FrozenTarget, batch: HeadBatch, num_places: int, seed: int
) -> tuple[Tensor, Tensor]:
    """alpha and equal argmax by place and first draft position, each `[K, B * S]`, NaN where there is none."""
    alphas: list[Tensor] = []
    matches: list[Tensor] = []
    with target.autocast():
        logits = target_logits(batch, target.decoder.output_logits)
        for place in head.places(batch, target.decoder, num_places, seed):
            alpha = acceptance(place, logits, head.vocabulary)
            match = same_argmax(place, logits, head.vocabulary)
            size = batch.wanted[:, 1:].numel()
            for found, values in ((alphas, alpha), (matches, match)):
                line = torch.full((size,), float("nan"), device=values.device, dtype=torch.float32)
                line[place.rows - place.number] = values.float()
                found.append(line)
    return torch.stack(alphas), torch.stack(matches)
