"""What a drafter accepts along the target's own answers, in plain float arithmetic.

Every row of an answer begins a draft. The chance of place k is that of a draft along the answer's own tokens
(teacher-forced), and the draft's k-th token counts as accepted by the product of the chances up to k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.heads.base import Head, HeadBatch, Place
from foretoken.heads.losses import RowLogits, acceptance, same_argmax, target_logits
from foretoken.measure.stats import Counts, Interval, ratio, ratio_interval
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.students import Student

_NUM_SEEDS = 4  # a kind of head that samples its rows goes on from others with each
Text = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and answer


@dataclass(frozen=True)
class Sampling:
    """How drafts are drawn and verified; `greedy_drafts` above temperature 0: the likeliest token as a point mass."""

    temperature: float = 0.0
    greedy_drafts: bool = False


@dataclass(frozen=True)
class Accepted:
    """By text, the drafts that began in it, and by place their accepted tokens `[K, n]`; `num_broken` rows of logits
    were not finite.
    """

    num_drafts: tuple[int, ...]
    by_place: tuple[tuple[float, ...], ...]
    num_broken: int = 0

    @property
    def counts(self) -> Counts:
        """(accepted tokens, drafts) of each text, [n, 2]."""
        return np.stack([np.array(self.by_place).sum(0), np.array(self.num_drafts, dtype=np.float64)], axis=1)

    @property
    def per_draft(self) -> float:
        """Accepted tokens per draft."""
        return ratio(self.counts) or 0.0

    @property
    def interval(self) -> Interval | None:
        """Of `per_draft`, over texts."""
        return ratio_interval(self.counts)

    @property
    def places(self) -> tuple[float, ...]:
        """Share of the drafts whose token at each place is accepted."""
        total = max(1, sum(self.num_drafts))
        return tuple(sum(own) / total for own in self.by_place)


def texts_from(values: Sequence[Any]) -> list[Text]:
    """Texts that a file holds as plain values."""
    return [(tuple(prompt), tuple(answer)) for prompt, answer in values]


def accepted_from(values: Mapping[str, Any]) -> Accepted:
    """What a file holds of an `Accepted`, as plain values."""
    return Accepted(tuple(values["num_drafts"]), tuple(map(tuple, values["by_place"])), values["num_broken"])


def read_texts(target: FrozenTarget, texts: Sequence[Text], layers: Sequence[int]) -> list[HeadBatch]:
    """One window for each text, in which the answer is wanted."""
    found = []
    for prompt, answer in texts:
        tokens = torch.tensor([[*prompt, *answer]])
        found.append(target.read(tokens, torch.arange(tokens.shape[1])[None] >= len(prompt), layers))
    return found


def windows(batch: HeadBatch, length: int) -> list[HeadBatch]:
    """A text in windows of `length` rows that overlap by half, each token wanted in the one that has most before it."""
    num_rows, found = batch.tokens.shape[1] - 1, []
    for start in range(0, max(1, num_rows - length // 2), max(1, length // 2)):
        rows, tokens = slice(start, start + length), slice(start, start + length + 1)
        wanted = batch.wanted[:, tokens].clone()
        if start:
            wanted[:, : length // 2 + 1] = False
        states = {layer: state[:, rows] for layer, state in batch.states.items()}
        found.append(HeadBatch(batch.tokens[:, tokens], wanted, states, batch.normed[:, rows]))
    return found


@torch.no_grad()
def measure(
    head: Student,
    target: FrozenTarget,
    batches: Sequence[HeadBatch],
    num_places: int,
    sampling: Sampling,
    length: int | None = None,
) -> Accepted:
    """Accepted tokens of drafts of `num_places` tokens along texts; with `length` it sees no more rows at once."""
    head.eval()
    found: list[tuple[int, Tensor, int]] = []
    for batch in batches:
        parts = [batch] if length is None else windows(batch, length)
        own = [_of_window(head, target, part, num_places, sampling) for part in parts]
        sums = torch.stack([part[1] for part in own]).sum(0)
        found.append((sum(part[0] for part in own), sums, sum(part[2] for part in own)))
    by_place = torch.stack([sums for _, sums, _ in found], dim=1)  # [K, n]
    return Accepted(
        tuple(count for count, _, _ in found),
        tuple(tuple(own) for own in by_place.tolist()),
        sum(broken for _, _, broken in found),
    )


def _of_window(
    head: Student, target: FrozenTarget, batch: HeadBatch, num_places: int, sampling: Sampling
) -> tuple[int, Tensor, int]:
    """Drafts, accepted tokens by place [K], and rows that are not finite."""
    samples_rows = isinstance(head, Head) and head.samples_rows
    num_rows, num_drafts, num_broken = batch.wanted.shape[1] - 1, 0, 0
    sums = torch.zeros(num_places, dtype=torch.float64)
    logits = target_logits(batch, target.decoder.output_logits)
    for seed in range(_NUM_SEEDS if samples_rows else 1):
        chances = torch.full((num_places, num_rows), float("nan"), dtype=torch.float64)
        num_known = 0
        for place in head.places(batch, target.decoder, num_places, seed):
            chance, broken = _chances(head, place, logits, sampling)
            chances[place.number, place.rows - place.number] = chance.double()
            num_known, num_broken = place.number + 1, num_broken + broken
        whole = chances[:num_known, ~chances[:num_known].isnan().any(0)]
        if num_known:
            num_drafts += whole.shape[1]
            sums[:num_known] += whole.cumprod(0).sum(1)
    return num_drafts, sums, num_broken


def _chances(head: Student, place: Place, logits: RowLogits, sampling: Sampling) -> tuple[Tensor, int]:
    """The chance that each row's token is accepted, [R]: none where a logit is not finite. How many those are."""
    theirs = logits(place.rows)
    is_whole = place.logits.isfinite().all(-1) & theirs.isfinite().all(-1)
    if sampling.temperature == 0:
        chance = same_argmax(place, logits, head.vocabulary).float()
    elif sampling.greedy_drafts:
        drawn = head.vocabulary.to_target(place.logits.argmax(-1))
        chance = (theirs.float() / sampling.temperature).softmax(-1).gather(1, drawn[:, None]).squeeze(1)
    else:
        scaled = replace(place, logits=place.logits.float() / sampling.temperature)
        chance = acceptance(scaled, lambda rows: logits(rows).float() / sampling.temperature, head.vocabulary)
    return chance.where(is_whole, 0.0), int((~is_whole).sum())
