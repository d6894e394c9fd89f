"""Chains and trees from the logits of places: for heads that predict all places of a draft in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core import BatchEntry, Draft
from foretoken.draft import branches, chain
from foretoken.draft.branches import Growth
from foretoken.draft.chain import Chain
from foretoken.draft.merging import merge_drafts
from foretoken.transfer import to_device


class PlaceLogits(Protocol):
    """What a head says of each place of a round's drafts."""

    def at(self, place: int, requests: Sequence[int], before: Tensor) -> Tensor:
        """Logits `[A, V]` at a place of the drafts of `requests` (numbers of entries) behind the tokens `before`
        [A, place + 1], the anchor and what was drafted.
        """

    def confidence(self, place: int, request: int) -> float:
        """The head's own estimate that its token at a place is accepted, known before it is drawn; 1 if it has none."""


def propose_by_place(
    name: str, device: torch.device, entries: Sequence[BatchEntry], most: Sequence[int], logits: PlaceLogits
) -> Draft:
    """Drafts of all `entries`, no deeper than `most` of each: trees where they are wanted and taken, else chains."""
    trees = [b for b, entry in enumerate(entries) if entry.takes_trees and entry.request.spec.tree != "chain"]
    chains = [b for b in range(len(entries)) if b not in trees]
    parts = []
    if chains:
        parts.append((chains, _chains(name, device, entries, most, chains, logits)))
    if trees:
        parts.append((trees, _trees(name, device, entries, most, trees, logits)))
    return merge_drafts(len(entries), parts, device)


def _chains(
    name: str,
    device: torch.device,
    entries: Sequence[BatchEntry],
    most: Sequence[int],
    requests: Sequence[int],
    logits: PlaceLogits,
) -> Draft:
    chains = {b: Chain(entries[b], most[b]) for b in requests}
    anchors = {b: to_device(entries[b].pending[-1:], device)[0] for b in requests if chains[b].grows}
    place = 0
    while True:
        for b, one in chains.items():
            one.stopped |= one.grows and _is_unsure(entries[b], logits.confidence(place, b))
        growing = [b for b, one in chains.items() if one.grows]
        if not growing:
            break
        before = torch.stack([torch.stack((anchors[b], *chains[b].tokens)) for b in growing])  # [A, place + 1]
        chain.extend([chains[b] for b in growing], logits.at(place, growing, before))
        place += 1
    return chain.assemble(name, device, list(chains.values()))


def _trees(
    name: str,
    device: torch.device,
    entries: Sequence[BatchEntry],
    most: Sequence[int],
    requests: Sequence[int],
    logits: PlaceLogits,
) -> Draft:
    growths = {b: Growth(entries[b], entries[b].num_draft, most[b]) for b in requests}
    place = 0
    while True:
        for b, growth in growths.items():
            if growth.frontier and _is_unsure(entries[b], logits.confidence(place, b)):
                growth.frontier = []
        growing = [b for b, growth in growths.items() if growth.frontier]
        if not growing:
            break
        owners = [(b, node) for b in growing for node in growths[b].frontier]
        before = to_device([[entries[b].pending[-1], *growths[b].path(node)] for b, node in owners], device)
        branches.extend([growths[b] for b in growing], logits.at(place, [b for b, _ in owners], before))
        place += 1
    return branches.assemble(name, device, list(growths.values()))


def _is_unsure(entry: BatchEntry, confidence: float) -> bool:
    """Whether nothing is to be drafted at a place, settled before anything is drawn there."""
    return confidence < entry.request.spec.min_confidence
