"""A smaller language model guesses token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own cache. After a round that accepted everything its cache lacks the last guess, which it never ran
itself: such tokens wait in `pending` and are run first the next time (METHODS: full acceptance).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Mass, Request, Verdict
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.sampling import Purpose, check_finite, sample, target_probs, uniforms

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
        entries = batch.decoding
        lengths = [self._room(entry) for entry in entries]
        chains: list[list[Tensor]] = [[] for _ in entries]
        laws: list[Tensor] = []
        law_ids: list[list[int]] = [[] for _ in entries]
        active = [b for b, length in enumerate(lengths) if length]
        last: Tensor | None = None
        for position in range(max(lengths, default=0)):
            still = [i for i, b in enumerate(active) if lengths[b] > position]
            previous = None if last is None else last[torch.tensor(still, device=last.device)]
            active = [active[i] for i in still]
            chosen = [entries[b] for b in active]
            logits = self._advance(chosen, previous)
            last, law = _choose(logits, chosen, position)
            for i, b in enumerate(active):
                chains[b].append(last[i])
                if not chosen[i].request.params.greedy:
                    assert law is not None
                    law_ids[b].append(len(laws))
                    laws.append(law[i])
        return _assemble(self.name, self.model.device, chains, laws, law_ids)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Mapping[int, Tensor]) -> None:  # noqa: ARG002
        """Cut the cache back to what was accepted and note what it still has to run."""
        for b, entry in enumerate(batch.decoding):
            sequence, num_drafted, num_accepted = entry.request.request_id, draft.lengths[b], len(verdict.accepted[b])
            emitted = verdict.emitted(b)
            if not num_drafted:
                self._pending[sequence].extend(emitted)
                continue
            held = min(num_accepted, num_drafted - 1)  # the last guess was never an input
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

    def _advance(self, entries: list[BatchEntry], previous: Tensor | None) -> Tensor:
        """Run the next input of every request; logits `[A, V]` after it. Without `previous`, first catch up."""
        if previous is not None:
            segments = [Segment(entry.request.request_id, 1) for entry in entries]
            return self._forward(previous, segments)
        for entry in entries:
            self._catch_up(entry.request.request_id)
        pending = [self._pending[entry.request.request_id] for entry in entries]
        segments = [Segment(entry.request.request_id, len(tokens)) for entry, tokens in zip(entries, pending, strict=True)]
        flat = torch.tensor([token for tokens in pending for token in tokens], dtype=torch.int64, device=self.model.device)
        return self._forward(flat, segments)

    def _forward(self, tokens: Tensor, segments: list[Segment]) -> Tensor:
        logits = self.model.forward(tokens, segments).logits
        for segment in segments:
            self.model.commit(segment.sequence, segment.num_pending)
        return logits

    def _catch_up(self, sequence: int) -> None:
        """Run a long backlog (a prompt) in pieces, leaving at most one piece pending."""
        pending = self._pending[sequence]
        while len(pending) > _CATCH_UP_TOKENS:
            piece, pending = pending[:_CATCH_UP_TOKENS], pending[_CATCH_UP_TOKENS:]
            self.model.forward(torch.tensor(piece, dtype=torch.int64, device=self.model.device), [Segment(sequence, len(piece), (), 0)])
            self.model.commit(sequence, len(piece))
        self._pending[sequence] = pending


def _choose(logits: Tensor, entries: list[BatchEntry], position: int) -> tuple[Tensor, Tensor | None]:
    """Next token `[A]` of each request and, unless all are greedy, the law `[A, V]` it was drawn from."""
    params = [entry.request.params for entry in entries]
    if all(p.greedy for p in params):
        return logits.argmax(dim=-1), None
    # A draft that overflows guesses at random from here on: a law with NaN in it would reach the target's residual.
    logits = torch.where(check_finite(logits)[:, None], logits, torch.zeros_like(logits))
    law = target_probs(logits, params)
    u = uniforms([entry.request.seed for entry in entries], Purpose.DRAFT, [entry.round_start for entry in entries], [position] * len(entries))
    return sample(law, torch.from_numpy(u).to(law.device)), law


def _assemble(name: str, device: torch.device, chains: list[list[Tensor]], laws: list[Tensor], law_ids: list[list[int]]) -> Draft:
    """One ragged draft of chains; a request drafted greedily has point masses, a sampled one its laws."""
    offsets = [0]
    for chain in chains:
        offsets.append(offsets[-1] + len(chain))
    flat = [token for chain in chains for token in chain]
    # The row of the last guess of a chain has no law: the length was fixed before, so nothing could have followed.
    law_of_row = tuple(law for chain, ids in zip(chains, law_ids, strict=True) for law in [*ids, *[-1] * (len(chain) + 1 - len(ids))])
    return Draft(
        tokens=torch.stack(flat) if flat else torch.empty(0, dtype=torch.int64, device=device),
        parents=tuple(i - 1 for chain in chains for i in range(len(chain))),
        offsets=tuple(offsets),
        drafters=tuple(name if chain else None for chain in chains),
        sampled=tuple(bool(ids) for chain, ids in zip(chains, law_ids, strict=True) for _ in chain) if laws else (),
        mass=Mass(torch.stack(laws), law_of_row) if laws else None,
    )
