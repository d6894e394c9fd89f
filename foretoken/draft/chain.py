"""Chains drawn token by token from the logits of a model, for every drafter that samples.

Whether a position is drafted is decided before its token is drawn, from the distribution there (`min_confidence`) or by
a coin (`draft_probability`). Only the coin changes the mass: where it may say no, the mass is a * q, drafted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core import BatchEntry, Draft
from foretoken.draft.merging import RequestNodes, ragged_draft
from foretoken.heads.base import DraftVocabulary
from foretoken.text.randomness import Purpose, uniforms
from foretoken.text.sampling import draft_probs, without_broken
from foretoken.transfer import to_device, to_host
from foretoken.verify.base import draw, first_max, race_winners

# What `draft_probability="auto"` leaves to choose from in each round.
PROBABILITIES: Mapping[str, Sequence[float]] = {"draft_probability": (0.25, 0.5, 0.75, 1.0)}


@dataclass
class Chain:
    """One request's draft while it grows: `tokens`, and for each place the mass it was drawn from (None: a point).

    `open` is the mass at the place after the last draft token when a coin said no there.
    """

    entry: BatchEntry
    most: int
    tokens: list[Tensor] = field(default_factory=list)
    masses: list[Tensor | None] = field(default_factory=list)
    open: Tensor | None = None
    stopped: bool = False

    @property
    def grows(self) -> bool:
        """Whether another place may be drafted."""
        return not self.stopped and len(self.tokens) < self.most


def takes_likeliest(chains: Sequence[Chain]) -> bool:
    """Whether `extend` draws the likeliest token of the logits as they are at every place, until a chain is full."""
    entries = [chain.entry for chain in chains]
    return all(
        one.request.params.greedy
        and not one.request.spec.min_confidence
        and one.processors is None
        and one.draft_probability >= 1
        for one in entries
    )


def extend(chains: list[Chain], logits: Tensor, vocabulary: DraftVocabulary | None = None) -> None:
    """Draw the next token of every chain from its row of `logits` `[A, V]`, or stop the chain there.

    With a `vocabulary` the logits [A, V_d] are over that: the likeliest token is found without the whole one.
    """
    position = len(chains[0].tokens)  # all chains that still grow are equally long
    params = [chain.entry.request.params for chain in chains]
    specs = [chain.entry.request.spec for chain in chains]
    is_likeliest = all(p.greedy for p in params) and not any(spec.min_confidence for spec in specs)
    if vocabulary is not None and not (is_likeliest and all(chain.entry.processors is None for chain in chains)):
        logits, vocabulary = vocabulary.expand(logits), None
    logits = _processed(chains, logits)
    if is_likeliest:
        probs, chosen = None, first_max(logits)
        chosen = chosen if vocabulary is None else vocabulary.to_target(chosen)
    else:
        # [A, V]; temperature 1 where the request is greedy
        probs = draft_probs(logits, params, [spec.draft_top_k for spec in specs])
        chosen = _draw(chains, probs, position)
    drafts = _decide(chains, probs, position)
    for i, chain in enumerate(chains):
        mass = None if probs is None or params[i].greedy or chain.entry.noise is not None else probs[i]
        if mass is not None and chain.entry.draft_probability < 1:
            mass = chain.entry.draft_probability * mass
        if drafts[i]:
            chain.tokens.append(chosen[i])
            chain.masses.append(mass)
        else:
            chain.stopped = True
            chain.open = mass if drafts[i] is None else None


def _processed(chains: list[Chain], logits: Tensor) -> Tensor:
    processed = [i for i, chain in enumerate(chains) if chain.entry.processors is not None]
    if not processed:
        return without_broken(logits)
    paths: dict[int, tuple[int, ...]] = dict.fromkeys(processed, ())
    if chains[0].tokens:  # all chains that still grow are equally long
        found = to_host(*(torch.stack(chains[i].tokens) for i in processed))
        paths = {i: tuple(path) for i, path in zip(processed, found, strict=True)}
    return adjusted(logits, [chain.entry for chain in chains], [1] * len(chains), lambda i: [paths[i]])


def adjusted(
    logits: Tensor,
    entries: Sequence[BatchEntry],
    num_rows: Sequence[int],
    paths: Callable[[int], Sequence[tuple[int, ...]]],
) -> Tensor:
    """A draft's logits `[A, V]` as each request's own processors make them, so that it obeys what the target must obey:
    `num_rows` of each of `entries`, behind the `paths` that are asked for by its number.
    """
    # A model that overflows drafts at random from here on: NaN in the mass would reach the target's residual.
    logits = without_broken(logits)
    if all(entry.processors is None for entry in entries):
        return logits
    logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    stop = 0
    for number, (entry, count) in enumerate(zip(entries, num_rows, strict=True)):
        rows, stop = slice(stop, stop + count), stop + count
        if entry.processors is not None:
            logits[rows] = entry.processors.adjust(logits[rows], paths(number), is_draft=True)
    return logits


def draft_numbers(purpose: Purpose, entries: Sequence[BatchEntry], indices: Sequence[int]) -> NDArray[np.float64]:
    """Random numbers of the requests' rounds, one for each of `indices`: [n]."""
    return uniforms(
        [entry.request.seed for entry in entries], purpose, [entry.round_start for entry in entries], indices
    )


def _draw(chains: list[Chain], probs: Tensor, position: int) -> Tensor:
    """One token `[A]` per chain: the likeliest if greedy, the winner of the race if coupled, else a sample."""
    chosen = first_max(probs)
    sampled = [
        i for i, chain in enumerate(chains) if not chain.entry.request.params.greedy and chain.entry.noise is None
    ]
    if sampled:
        u = draft_numbers(Purpose.DRAFT, [chains[i].entry for i in sampled], [position] * len(sampled))
        rows = to_device(sampled, probs.device)
        chosen[rows] = draw(probs[rows], to_device(torch.from_numpy(u), probs.device, None))
    racing = [
        (i, chain.entry.noise.rows([chain.entry.round_start + position]))
        for i, chain in enumerate(chains)
        if chain.entry.noise is not None and not chain.entry.request.params.greedy
    ]
    if racing:
        rows = to_device([i for i, _ in racing], probs.device)
        chosen[rows] = race_winners(probs[rows], [race for _, race in racing])
    return chosen


def _decide(chains: list[Chain], probs: Tensor | None, position: int) -> list[bool | None]:
    """Whether each chain drafts its next place: True, False (too unsure), None (the coin said no)."""
    decided: list[bool | None] = [True] * len(chains)
    unsure = [chain.entry.request.spec.min_confidence for chain in chains]
    if probs is not None and any(unsure):
        decided = list(to_host(probs.amax(-1) >= to_device(unsure, probs.device, torch.float32))[0])
    tossed = [i for i, chain in enumerate(chains) if chain.entry.draft_probability < 1 and decided[i]]
    if tossed:
        coins = draft_numbers(Purpose.COIN, [chains[i].entry for i in tossed], [position] * len(tossed))
        for i, coin in zip(tossed, coins, strict=True):
            if coin >= chains[i].entry.draft_probability:
                decided[i] = None
    return decided


def points(name: str, lengths: Sequence[int], tokens: Tensor) -> Draft:
    """One ragged draft of chains of likeliest tokens, one chain behind the other in `tokens`."""
    return ragged_draft(name, tokens, [RequestNodes(range(-1, length - 1)) for length in lengths])


def assemble(name: str, device: torch.device, chains: list[Chain]) -> Draft:
    """One ragged draft of chains; a request drafted greedily has point masses, a sampled one its distributions."""
    flat = [token for chain in chains for token in chain.tokens]
    tokens = torch.stack(flat) if flat else torch.empty(0, dtype=torch.int64, device=device)
    # The last token's row has no distribution, unless a coin was tossed there: the length was fixed before.
    nodes = [
        RequestNodes(
            range(-1, len(one.tokens) - 1),
            [*one.masses, one.open],
            [mass is not None for mass in one.masses],
            has_run=one.most > 0,
        )
        for one in chains
    ]
    return ragged_draft(name, tokens, nodes)
