"""A smaller language model guesses token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own cache. After a round that accepted everything its cache lacks the last guess, which it never ran
itself: such tokens wait in `pending` and are run first the next time. The chains themselves are drawn in `chain`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.model.interface import LanguageModel, Segment

_CATCH_UP_TOKENS = 512  # rows of a long prompt that the draft model takes in one forward


class DraftModelDrafter:
    """Chains sampled from a draft model under the request's own sampling parameters."""

    name = "draft_model"

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._pending: dict[int, list[int]] = {}  # committed tokens that the draft's cache does not hold yet

    def start(self, request: Request) -> None:
        """Open a sequence; the prompt is run when something is first drafted."""
        self.model.open(request.request_id)
        self._pending[request.request_id] = list(request.prompt_ids)

    def propose(self, batch: Batch) -> Draft:
        """Guess up to `num_draft` tokens per request; a request for which the cache has no room gets none."""
        chains = [Chain(entry, self._room(entry)) for entry in batch.decoding]
        growing = [chain for chain in chains if chain.grows]
        while growing:
            logits = self._advance(growing)
            extend(growing, logits)
            growing = [chain for chain in growing if chain.grows]
        return assemble(self.name, self.model.device, chains)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Cut the cache back to what was accepted and note what it still has to run."""
        for b, entry in enumerate(batch.decoding):
            sequence, emitted = entry.request.request_id, verdict.emitted(b)
            ran = self.model.length(sequence) - entry.round_start  # guesses that were inputs too; negative: nothing was drafted
            if ran < 0:
                self._pending[sequence].extend(emitted)
                continue
            held = min(len(verdict.accepted[b]), ran)
            self.model.rollback(sequence, entry.round_start + held)
            self._pending[sequence] = list(emitted[held:])

    def finish(self, request_id: int) -> None:
        """Close the sequence."""
        self.model.close(request_id)
        del self._pending[request_id]

    def _room(self, entry: BatchEntry) -> int:
        """How many tokens can be drafted for `entry` within the draft's context and cache."""
        sequence = entry.request.request_id
        length = min(entry.num_draft, self.model.max_context_tokens - entry.round_start)
        if length <= 0 or not self.model.reserve(sequence, len(self._pending[sequence]) + length):
            return 0
        return length

    def _advance(self, chains: list[Chain]) -> Tensor:
        """Run the next input of every chain, a backlog of committed tokens first; logits `[A, V]` after it."""
        device = self.model.device
        pieces: list[Tensor] = []
        segments: list[Segment] = []
        for chain in chains:
            sequence = chain.entry.request.request_id
            if chain.tokens:
                pieces.append(chain.tokens[-1][None])
                segments.append(Segment(sequence, 1))
                continue
            pending, self._pending[sequence] = catch_up(self.model, sequence, self._pending[sequence]), []
            pieces.append(torch.tensor(pending, dtype=torch.int64, device=device))
            segments.append(Segment(sequence, len(pending)))
        logits = self.model.forward(torch.cat(pieces), segments).logits
        for segment in segments:
            self.model.commit(segment.sequence, segment.num_pending)
        return logits


def catch_up(model: LanguageModel, sequence: int, pending: list[int]) -> list[int]:
    """Run a long backlog (a prompt) in pieces; what is left, at most one piece, is to be run with everybody else's rows."""
    while len(pending) > _CATCH_UP_TOKENS:
        piece, pending = pending[:_CATCH_UP_TOKENS], pending[_CATCH_UP_TOKENS:]
        model.forward(torch.tensor(piece, dtype=torch.int64, device=model.device), [Segment(sequence, len(piece), (), 0)])
        model.commit(sequence, len(piece))
    return pending
