"""One forward of the target over a whole batch: committed rows and guesses in, the target's law of every row out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core import Batch, Draft
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.sampling import check_finite, near_ties, target_probs


@dataclass(frozen=True)
class TargetOutput:
    """`probs` [R, V] float32 after all sampling parameters, `taps` by layer [R, D], and which requests came out broken."""

    probs: Tensor
    taps: dict[int, Tensor]
    broken: frozenset[int]  # indices into `batch.decoding` whose logits are not finite
    near_ties: tuple[bool, ...]  # [R] greedy rows whose choice hangs on rounding


class Runner:
    """Lays a batch and its draft out as one flat run of tokens for the target."""

    def __init__(self, target: LanguageModel, taps: Sequence[int] = ()) -> None:
        self.target, self.taps = target, tuple(taps)

    def forward(self, batch: Batch, draft: Draft) -> TargetOutput:
        """Run every pending token and every guess; answer for the decoding entries' rows."""
        segments: list[Segment] = []
        pieces: list[Tensor] = []
        device = self.target.device
        for b, entry in enumerate(batch.decoding):
            nodes = slice(draft.offsets[b], draft.offsets[b + 1])
            parents = draft.parents[nodes]
            segments.append(Segment(entry.request.request_id, len(entry.pending), parents, 1 + len(parents)))
            pieces.append(torch.tensor(entry.pending, dtype=torch.int64, device=device))
            if parents:
                pieces.append(draft.tokens[nodes].to(device))
        for entry in batch.entries[len(batch.decoding) :]:
            segments.append(Segment(entry.request.request_id, len(entry.pending), (), 0))
            pieces.append(torch.tensor(entry.pending, dtype=torch.int64, device=device))
        output = self.target.forward(torch.cat(pieces), segments, self.taps)
        return self._law(batch, draft, output.logits, output.taps)

    def _law(self, batch: Batch, draft: Draft, logits: Tensor, taps: dict[int, Tensor]) -> TargetOutput:
        params = [entry.request.params for b, entry in enumerate(batch.decoding) for _ in range(1 + draft.lengths[b])]
        finite = check_finite(logits)
        broken: frozenset[int] = frozenset()
        if not bool(finite.all()):
            rows = finite.tolist()
            broken = frozenset(b for b in range(draft.num_requests) if not all(rows[row] for row in draft.rows_of([b])))
            # The neighbours go on; a broken request gets a harmless law, and its error when the step emits.
            logits = torch.where(finite[:, None], logits, torch.zeros_like(logits))
        ties = near_ties(logits).tolist() if any(p.greedy for p in params) else [False] * len(params)
        near = tuple(tie and p.greedy for tie, p in zip(ties, params, strict=True))
        return TargetOutput(target_probs(logits, params), taps, broken, near)
