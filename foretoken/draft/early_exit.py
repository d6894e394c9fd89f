"""The target drafts for itself with some of its layers, in its own cache, and the verify pass goes on from there.

Exit mode (LayerSkip, Elhoushi et al. 2404.16710): the first layers, final norm and head. What they computed for a row,
keys, values and residual stream, is what the verify pass would compute, so it runs only the other layers for it. Skip
mode (SWIFT, Xia et al. 2410.06916): some layers are left out; what ran before the first gap is taken up, the rest is
run again.

Nothing is kept of a request between rounds but, while a set of layers is searched for, the end of its text. What was
learned about the layers belongs to the target: it holds for all its requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.chain import Chain, assemble, extend
from foretoken.draft.layer_choice import ExitChoice, SkipSearch, kept_layers
from foretoken.model.interface import EarlyExitModel, EarlySegment
from foretoken.model.sampling import check_finite, target_probs
from foretoken.verify import first_max

_LOOK_ROWS = 4  # rows of a round that a look takes: a head over a few rows costs as much as over one
_TRIAL_ROWS = 24  # rows of finished text in a trial of a set of layers
_TRIAL_SEQUENCE = -(1 << 50)  # opened and closed within one call


class EarlyExitDrafter:
    """Chains sampled from the target's own first layers, or from all but some, under the request's own sampling
    parameters.
    """

    name = "early_exit"

    def __init__(self, target: EarlyExitModel) -> None:
        self.target = target
        self.exits = ExitChoice(target.num_layers, target.head_cost())
        self.skips = SkipSearch(target.num_layers, target.head_cost())
        self._looks = False
        self._recent: dict[int, list[int]] = {}  # last emitted tokens of requests for which layers are searched

    def start(self, request: Request) -> None:
        """Keep the end of the text if layers are to be searched for it."""
        if request.spec.skip_layers == "auto":
            self._recent[request.request_id] = []

    def propose(self, batch: Batch) -> Draft:
        """Guess `num_draft` tokens for every entry, fewer where an automatic choice says so; none where there is no
        room.
        """
        entries = batch.decoding
        automatic = any(
            entry.request.spec.exit_layer == "auto" and entry.request.spec.skip_layers is None for entry in entries
        )
        self._looks = automatic and self.exits.looks()
        chains: list[Chain] = []
        by_layers: dict[tuple[int, ...], list[Chain]] = {}
        for entry in entries:
            layers, most = self._plan(entry)
            chains.append(Chain(entry, self._room(entry, most)))
            by_layers.setdefault(layers, []).append(chains[-1])
        for layers, members in by_layers.items():
            growing = [chain for chain in members if chain.grows]
            while growing:
                extend(growing, self._advance(growing, layers))
                growing = [chain for chain in growing if chain.grows]
        return assemble(self.name, self.target.device, chains)

    def taps(self) -> tuple[int, ...]:
        """Layers whose residual stream the round's verify pass should hand back: every exit that may be chosen, now and
        then.
        """
        return self.exits.candidates if self._looks else ()

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Learn how often the exits would have agreed with the target, and now and then try other layers."""
        if self._looks and all(layer in feedback.taps for layer in self.exits.candidates):
            self._look(batch, draft, verdict, feedback)
        self._looks = False
        if self._recent:
            for b, entry in enumerate(batch.decoding):
                recent = self._recent.get(entry.request.request_id)
                if recent is not None:
                    recent += verdict.emitted(b)
                    del recent[: -_TRIAL_ROWS - 1]
            self._try_skips(batch)

    def finish(self, request_id: int) -> None:
        """Forget the end of its text."""
        self._recent.pop(request_id, None)

    def _plan(self, entry: BatchEntry) -> tuple[tuple[int, ...], int]:
        """The layers that draft for `entry`, and how many tokens."""
        spec = entry.request.spec
        if spec.skip_layers == "auto":
            return self.skips.choose(entry.num_draft)
        if spec.skip_layers is not None:
            return kept_layers(
                frozenset(int(layer) for layer in spec.skip_layers), self.target.num_layers
            ), entry.num_draft
        if spec.exit_layer != "auto":
            return tuple(range(spec.exit_layer)), entry.num_draft
        exit_layer, most = self.exits.choose(entry.num_draft)
        return tuple(range(exit_layer)), most

    def _room(self, entry: BatchEntry, most: int) -> int:
        """`most`, or 0 if the cache cannot take the rows that the verify pass will bring."""
        return most if most and self.target.reserve(entry.request.request_id, len(entry.pending) + most) else 0

    def _advance(self, chains: Sequence[Chain], layers: Sequence[int]) -> Tensor:
        """Run the next input of every chain through `layers`, the anchor first; logits `[A, V]` after it."""
        device = self.target.device
        pieces: list[Tensor] = []
        segments: list[EarlySegment] = []
        for chain in chains:
            sequence, pending = chain.entry.request.request_id, chain.entry.pending
            if chain.tokens:
                pieces.append(chain.tokens[-1][None])
                segments.append(EarlySegment(sequence, len(pending) + len(chain.tokens) - 1, 1))
            else:
                pieces.append(torch.tensor(pending, dtype=torch.int64, device=device))
                segments.append(EarlySegment(sequence, 0, len(pending)))
        return self.target.forward_early(torch.cat(pieces), segments, layers)

    def _look(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """At a few rows whose text stands: the overlap of each exit's law with the target's (for a greedy request,
        whether they agree).

        The target's law knows penalties and bias, the exit's only what is forbidden: an estimate needs no more.
        """
        rows: list[int] = []
        params = []
        for b, entry in enumerate(batch.decoding):
            if entry.request.spec.exit_layer == "auto" and entry.request.spec.skip_layers is None:
                anchor = draft.anchor_row(b)
                own = [feedback.rows[row] for row in (anchor, *(anchor + 1 + node for node in verdict.paths[b]))]
                rows += own
                params += [entry.request.params] * len(own)
        rows, params = rows[:_LOOK_ROWS], params[:_LOOK_ROWS]
        if not rows:
            return
        said = feedback.logits[rows]  # [r, V]
        law = target_probs(said, params)
        hidden = torch.cat([feedback.taps[layer][rows] for layer in self.exits.candidates])  # [candidates * r, D]
        for layer, logits in zip(
            self.exits.candidates, torch.split(self.target.exit_logits(hidden), len(rows)), strict=True
        ):
            allowed = torch.where(check_finite(logits)[:, None], logits, 0).masked_fill(said == -torch.inf, -torch.inf)
            self.exits.learn(layer, torch.minimum(target_probs(allowed, params), law).sum(-1).tolist())

    def _try_skips(self, batch: Batch) -> None:
        """A trial on the end of the first text that is long enough, when one is due and there is room for a copy of its
        last block.
        """
        if not self.skips.tries():
            return
        ready = [entry for entry in batch.decoding if len(self._recent.get(entry.request.request_id, ())) > _TRIAL_ROWS]
        if not ready:
            return
        target, sequence = self.target, ready[0].request.request_id
        *rows, _ = recent = self._recent[sequence]
        target.fork(sequence, _TRIAL_SEQUENCE)
        try:
            target.rollback(_TRIAL_SEQUENCE, target.length(sequence) - len(rows))
            if target.reserve(_TRIAL_SEQUENCE, len(rows)):
                said = torch.tensor(recent[1:], device=target.device)
                inputs, segment = (
                    torch.tensor(rows, device=target.device),
                    EarlySegment(_TRIAL_SEQUENCE, 0, len(rows), len(rows)),
                )

                def agree(layers: tuple[int, ...]) -> list[float]:
                    return (first_max(target.forward_early(inputs, [segment], layers)) == said).double().tolist()

                self.skips.trial(agree, max(1, ready[0].num_draft))
        finally:
            target.close(_TRIAL_SEQUENCE)
