"""What every drafter does, and nothing about how.

A drafter keeps its own state per request, fed by `start` (the prompt) and `commit` (what the round emitted). It never
sees the target's probabilities of the step it drafts for, and may always propose nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.verify import first_max

DrafterKey = tuple[Hashable, ...]  # the name, and what else tells one instance from another


@dataclass(frozen=True)
class Feedback:
    """What the target's forward showed at the rows of a draft, R of them: `rows` are their places in the whole step's
    tensors.
    """

    logits: Tensor  # [R_step, V] after each request's processors
    rows: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # by layer, each [R_step, D]
    probe_logits: Tensor | None = None  # [P_step, V] the model's own behind every probe; None when none was run
    probe_rows: tuple[int, ...] = ()  # places of the draft's own probes among them

    def top_tokens(self, count: int) -> Tensor:
        """The `count` likeliest tokens after every row, likeliest first: [R, count]."""
        return self._own(self.logits).topk(min(count, self.logits.shape[-1]), dim=-1).indices

    def tap(self, layer: int) -> Tensor:
        """The residual stream after `layer` layers at every row: [R, D]."""
        return self._own(self.taps[layer])

    def after_probes(self) -> Tensor | None:
        """The likeliest token after every probe of the draft: [P]; None when the target did not run them."""
        if self.probe_logits is None:
            return None
        return first_max(self.probe_logits)[
            torch.tensor(self.probe_rows, dtype=torch.int64, device=self.probe_logits.device)
        ]

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor[torch.tensor(self.rows, dtype=torch.int64, device=tensor.device)]


class Drafter(Protocol):
    """Guesses tokens that the target then checks."""

    @property
    def name(self) -> str:
        """The name in `SpecConfig.drafter` and in each token's provenance."""

    def start(self, request: Request) -> None:
        """Take in a new request's prompt."""

    def propose(self, batch: Batch) -> Draft:
        """Guess for every decoding entry of `batch`, at most `entry.num_draft` nodes each; B segments, empty ones
        allowed.

        Beside them `Draft.probes`, at most `entry.num_probe` each and none deeper than `entry.probe_depth`.
        """

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Learn what the round emitted: `draft`, `verdict` and `feedback` are aligned with `batch.decoding`.

        A request's nodes may be somebody else's guesses (a grammar's): what counts is what was emitted. Probes need not
        have been run.
        """

    def finish(self, request_id: int) -> None:
        """Drop everything kept for a request."""


@runtime_checkable
class Taps(Protocol):
    """A drafter that looks at the residual stream of the rows it guessed for."""

    def taps(self) -> tuple[int, ...]:
        """Asked between `propose` and the target's forward: layers whose taps the feedback should hold this round."""


@runtime_checkable
class Reads(Protocol):
    """A drafter with models of its own, which first have to read what they have not seen of a text: a prompt, tokens of
    rounds that rested.
    """

    @property
    def num_read_tokens(self) -> int:
        """Committed tokens that its models read in the last `propose`, over all requests; 0 where none had more than a
        few to read.

        Such a round's time is not the price of its guesses.
        """


@runtime_checkable
class Releases(Protocol):
    """A drafter that can give back the cache of a request without forgetting the request."""

    def release(self, request_id: int) -> None:
        """Called between two rounds: free what the request's cache holds. It is read again when the request drafts
        again.
        """


@runtime_checkable
class Variants(Protocol):
    """A drafter with settings that the engine may choose anew in every round."""

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """The configurations to choose from: one for each value of a field of `spec` that is left at "auto"."""
