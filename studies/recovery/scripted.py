"""A drafter whose acceptance follows a script."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Feedback

STAND_IN = "ngram"  # the drafter whose place in the engine it takes
FORCED = 5  # the token that the target is forced to emit


class ScriptedDrafter:
    """Drafts the forced token with a scripted probability at each position, otherwise another token.

    `chances` holds that probability for every stretch of `stretch_steps` rounds; `chosen[request]` records the number
    of draft tokens of each round.
    """

    name = STAND_IN

    def __init__(self, chances: Sequence[float], stretch_steps: int, seed: int) -> None:
        self.chances, self.stretch_steps, self.seed = chances, stretch_steps, seed
        self.chosen: dict[int, list[int]] = {}

    def start(self, request: Request) -> None:
        """Its next round is round 0."""
        self.chosen[request.request_id] = []

    def propose(self, batch: Batch) -> Draft:
        """A chain for every request."""
        counts = [entry.num_draft for entry in batch.decoding]
        offsets = (0, *itertools.accumulate(counts))
        parents = tuple(place - 1 for count in counts for place in range(count))
        tokens = [
            token for entry in batch.decoding for token in self._drafted(entry.request.request_id, entry.num_draft)
        ]
        drafters = tuple(self.name if count else None for count in counts)
        return Draft(torch.tensor(tokens, dtype=torch.int64), parents, offsets, drafters)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Record the number of draft tokens of the round."""
        for entry in batch.decoding:
            self.chosen[entry.request.request_id].append(entry.num_draft)

    def finish(self, request_id: int) -> None:
        """Keep the recorded numbers."""

    def _drafted(self, request_id: int, count: int) -> list[int]:
        round_number = len(self.chosen[request_id])
        chance = self.chances[min(round_number // self.stretch_steps, len(self.chances) - 1)]
        rng = random.Random(f"{self.seed} {request_id} {round_number}")
        return [FORCED if rng.random() < chance else FORCED + 1 for _ in range(count)]
