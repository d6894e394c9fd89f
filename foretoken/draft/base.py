"""What every drafter does, and nothing about how.

A drafter keeps its own state per request, fed by `start` (the prompt) and `commit` (what the round emitted). It never
sees the target's probabilities of the step it drafts for, and may always propose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from foretoken.core import Batch, Draft, Request, Verdict


class Drafter(Protocol):
    """Guesses tokens that the target then checks."""

    @property
    def name(self) -> str:
        """The name in `SpecConfig.drafter` and in each token's provenance."""

    def start(self, request: Request) -> None:
        """Take in a new request's prompt."""

    def propose(self, batch: Batch) -> Draft:
        """Guess for every decoding entry of `batch`, at most `entry.num_draft` nodes each; B segments, empty ones allowed."""

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:
        """Learn what the round emitted: `draft` and `verdict` are aligned with `batch.decoding`."""

    def finish(self, request_id: int) -> None:
        """Drop everything kept for a request."""
