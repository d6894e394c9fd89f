"""A smaller language model guesses token by token (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own cache. After a round that accepted everything its cache lacks the last guess, which it never ran
itself: such tokens wait in `pending` and are run first the next time.

Whether a position is drafted is decided before its token is drawn, from the law there (`min_confidence`) or by a coin
(`draft_probability`). Only the coin leaves a trace in the mass: where it may say no, the mass is a * q, drafted or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Mass, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.model.interface import LanguageModel, Segment
from foretoken.model.randomness import Purpose, uniforms
from foretoken.model.sampling import check_finite, draft_law, sample
from foretoken.verify.base import race_winner

_CATCH_UP_TOKENS = 512  # rows of a long prompt that the draft model takes in one forward


@dataclass
class _Chain:
    """One request's guesses while they grow: `tokens`, and for each place the law it was drawn from (None: a point).

    `open` is the mass at the place after the last guess when a coin said no there.
    """

    entry: BatchEntry
    most: int
    tokens: list[Tensor] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)
    open: Tensor | None = None
    stopped: bool = False

    @property
    def grows(self) -> bool:
        return not self.stopped and len(self.tokens) < self.most


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
        chains = [_Chain(entry, self._room(entry)) for entry in batch.decoding]
        growing = [chain for chain in chains if chain.grows]
        while growing:
            logits = self._advance(growing)
            _extend(growing, logits)
            growing = [chain for chain in growing if chain.grows]
        return _assemble(self.name, self.model.device, chains)

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

    def _advance(self, chains: list[_Chain]) -> Tensor:
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
            self._catch_up(sequence)
            pending, self._pending[sequence] = self._pending[sequence], []
            pieces.append(torch.tensor(pending, dtype=torch.int64, device=device))
            segments.append(Segment(sequence, len(pending)))
        logits = self.model.forward(torch.cat(pieces), segments).logits
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


def _extend(chains: list[_Chain], logits: Tensor) -> None:
    """Draw the next token of every chain from its row of `logits` `[A, V]`, or stop the chain there."""
    position = len(chains[0].tokens)  # all chains that still grow are equally long
    params = [chain.entry.request.params for chain in chains]
    specs = [chain.entry.request.spec for chain in chains]
    # A draft that overflows guesses at random from here on: a law with NaN in it would reach the target's residual.
    logits = torch.where(check_finite(logits)[:, None], logits, torch.zeros_like(logits))
    logits = _processed(chains, logits)
    if all(p.greedy for p in params) and not any(spec.min_confidence for spec in specs):
        law, chosen = None, logits.argmax(-1)
    else:
        law = draft_law(logits, params, [spec.draft_top_k for spec in specs])  # [A, V]; temperature 1 where the request is greedy
        chosen = _draw(chains, law, position)
    drafts = _decide(chains, law, position)
    for i, chain in enumerate(chains):
        mass = None if law is None or params[i].greedy or chain.entry.noise is not None else law[i]
        if mass is not None and chain.entry.draft_probability < 1:
            mass = chain.entry.draft_probability * mass
        if drafts[i]:
            chain.tokens.append(chosen[i])
            chain.laws.append(mass)
        else:
            chain.stopped = True
            chain.open = mass if drafts[i] is None else None


def _processed(chains: list[_Chain], logits: Tensor) -> Tensor:
    """The request's own processors on the draft's logits, so that guesses obey what the target's tokens must obey."""
    if all(chain.entry.processors is None for chain in chains):
        return logits
    logits = logits.clone() if logits.dtype in (torch.float32, torch.float64) else logits.float()
    for i, chain in enumerate(chains):
        processors = chain.entry.processors
        if processors is not None:
            logits[i : i + 1] = processors.adjust(logits[i : i + 1], [tuple(int(token) for token in chain.tokens)])
    return logits


def _draw(chains: list[_Chain], law: Tensor, position: int) -> Tensor:
    """One token `[A]` per chain: the likeliest for a greedy request, the winner of the race for a coupled one, else a sample."""
    chosen = law.argmax(-1)
    sampled = [i for i, chain in enumerate(chains) if not chain.entry.request.params.greedy and chain.entry.noise is None]
    if sampled:
        entries = [chains[i].entry for i in sampled]
        u = uniforms([e.request.seed for e in entries], Purpose.DRAFT, [e.round_start for e in entries], [position] * len(entries))
        chosen[sampled] = sample(law[sampled], torch.from_numpy(u).to(law.device))
    for i, chain in enumerate(chains):
        if chain.entry.noise is not None and not chain.entry.request.params.greedy:
            noise = chain.entry.noise.at([chain.entry.round_start + position])
            chosen[i] = race_winner(law[i : i + 1], noise.to(law.device))[0]
    return chosen


def _decide(chains: list[_Chain], law: Tensor | None, position: int) -> list[bool | None]:
    """Whether each chain drafts its next place: True, False (too unsure: the law said so), None (the coin said no)."""
    decided: list[bool | None] = [True] * len(chains)
    unsure = [chain.entry.request.spec.min_confidence for chain in chains]
    if law is not None and any(unsure):
        decided = [bool(sure) for sure in (law.amax(-1) >= torch.tensor(unsure, device=law.device)).tolist()]
    tossed = [i for i, chain in enumerate(chains) if chain.entry.draft_probability < 1 and decided[i]]
    if tossed:
        entries = [chains[i].entry for i in tossed]
        coins = uniforms([e.request.seed for e in entries], Purpose.COIN, [e.round_start for e in entries], [position] * len(entries))
        for i, coin in zip(tossed, coins, strict=True):
            if coin >= chains[i].entry.draft_probability:
                decided[i] = None
    return decided


def _assemble(name: str, device: torch.device, chains: list[_Chain]) -> Draft:
    """One ragged draft of chains; a request drafted greedily has point masses, a sampled one its laws."""
    offsets: list[int] = [0]
    laws: list[Tensor] = []
    law_of_row: list[int] = []
    sampled: list[bool] = []
    for chain in chains:
        offsets.append(offsets[-1] + len(chain.tokens))
        # The row of the last guess has no law, unless a coin was tossed there: the length was fixed before.
        for law in [*chain.laws, chain.open]:
            law_of_row.append(-1 if law is None else len(laws))
            laws += [] if law is None else [law]
        sampled += [law is not None for law in chain.laws]
    flat = [token for chain in chains for token in chain.tokens]
    return Draft(
        tokens=torch.stack(flat) if flat else torch.empty(0, dtype=torch.int64, device=device),
        parents=tuple(i - 1 for chain in chains for i in range(len(chain.tokens))),
        offsets=tuple(offsets),
        drafters=tuple(name if chain.tokens or chain.open is not None else None for chain in chains),
        sampled=tuple(sampled) if laws else (),
        mass=Mass(torch.stack(laws), tuple(law_of_row)) if laws else None,
    )
