"""Chains and trees from the logits of places."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from foretoken import SamplingParams, SpecConfig
from foretoken.core import BatchEntry, Request
from foretoken.draft.branches import propose_by_place

VOCAB = 12


class Successors:
    """Every token is followed by the next one, nearly surely; confidences are given by place."""

    def __init__(self, confidences: Sequence[float]) -> None:
        self.confidences = confidences
        self.asked: list[tuple[int, list[int], list[list[int]]]] = []

    def at(self, place: int, requests: Sequence[int], before: Tensor) -> Tensor:
        self.asked.append((place, list(requests), before.tolist()))
        return 20.0 * torch.nn.functional.one_hot((before[:, -1] + 1) % VOCAB, VOCAB).float()

    def confidence(self, place: int, request: int) -> float:
        return self.confidences[place] if request == 0 else 1.0


def entry(number: int, tree: str, temperature: float, num_draft: int) -> BatchEntry:
    spec = SpecConfig("block", head="h", num_draft=num_draft, tree=tree, min_confidence=0.5)
    request = Request(number, (3, number), SamplingParams(temperature=temperature), spec, number)
    return BatchEntry(request, 1, (number,), True, num_draft)


@pytest.mark.parametrize("tree", ["chain", "static", "best_first"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_place_is_told_and_where_a_confidence_stops(tree: str, temperature: float) -> None:
    """The anchor and the path so far; nothing is asked for behind an unsure place, of that request alone."""
    entries = [entry(number, tree, temperature, 6) for number in range(3)]
    logits = Successors([0.9, 0.8, 0.3, 0.9, 0.9, 0.9])
    draft = propose_by_place("block", torch.device("cpu"), entries, [6, 4, 0], logits)
    assert draft.drafters == ("block", "block", None)
    for place, requests, before in logits.asked:
        assert 2 not in requests
        assert place < 2 or 0 not in requests
        assert all(len(tokens) == place + 1 for tokens in before)
        assert all(tokens[0] == entries[b].pending[-1] for b, tokens in zip(requests, before, strict=True))
    if tree == "chain":
        assert draft.lengths == (2, 4, 0)
        assert draft.tokens.tolist() == [1, 2, 2, 3, 4, 5]
    for b, deepest in enumerate((2, 4)):
        depths = []
        for parent in draft.parents[draft.offsets[b] : draft.offsets[b + 1]]:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert max(depths) <= deepest
        assert tree != "chain" or max(depths) == deepest
