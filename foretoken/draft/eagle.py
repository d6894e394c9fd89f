"""An EAGLE head drafts token by token from the target's hidden states (EAGLE-1, Li et al. 2401.15077; EAGLE-3, Li et
al. 2503.01840), as a chain or, as EAGLE-2 does (Li et al. 2406.16858), as a tree that grows where it is surest.

Hidden states of committed positions are kept as they come (`StatesDrafter`), and read when something is drafted. The
head's keys and values of the text stay in a cache of its own; those of draft tokens are forgotten each round, as
accepted tokens come back as the target's own states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request
from foretoken.draft import branches, chain
from foretoken.draft.base import Factory, HiddenRows
from foretoken.draft.branches import Growth
from foretoken.draft.chain import Chain
from foretoken.draft.head_drafter import USUAL_TOKENS, StatesDrafter, twin_target
from foretoken.draft.open_head import open_head, open_mtp
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle, EagleOutput
from foretoken.model.interface import LanguageModel, Segment
from foretoken.transfer import to_device

_PIECE_TOKENS = 512  # rows of a long backlog that one pass takes


class EagleDrafter(StatesDrafter):
    """Chains or trees that a trained EAGLE head draws under the request's own sampling parameters."""

    name = "eagle"

    def __init__(self, runner: CachedEagle) -> None:
        super().__init__(runner.cache, runner.head.hidden_layers(), runner.features)
        self.runner = runner
        self._texts: dict[int, list[int]] = {}

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        head, target = open_head(factory, spec, EagleHead)
        return cls(CachedEagle(head, target))

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        return type(self)(self.runner.twin(twin_target(self.runner.target, twin)))

    def start(self, request: Request) -> None:
        """Keep the prompt: a row pairs a state with the token behind it."""
        super().start(request)
        self._texts[request.request_id] = list(request.prompt_ids)

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`: states, and with them the text as far as the token behind them."""
        super().read_hidden(rows)
        for one in rows:
            text = self._texts[one.request_id]
            text[one.start :] = [*one.tokens, one.next_token, *text[one.stop + 1 :]]

    def propose(self, batch: Batch) -> Draft:
        """Draft up to `num_draft` tokens per request, all requests together; none where the cache has no room, or the
        states of the text are not complete.
        """
        entries = batch.decoding
        self.begin_round(entry.request.request_id for entry in entries if entry.num_draft)
        most = [self._room(entry) for entry in entries]
        self.make_features([entry.request.request_id for b, entry in enumerate(entries) if most[b]])
        return branches.propose_by_shape(
            entries,
            self.cache.device,
            lambda some: self._propose_chains([Chain(entries[b], most[b]) for b in some]),
            lambda some: self._propose_trees([Growth(entries[b], entries[b].num_draft, most[b]) for b in some]),
        )

    @property
    def head(self) -> EagleHead:
        """See `base.AdaptableDrafter`."""
        return self.runner.head

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """See `base.AdaptableDrafter`: those of `EagleHead.features`; version 1 keeps the target's own states."""
        return ("fc.", "fc_norm.", "input_norm.") if self.runner.head.config.version == 3 else ()

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        super().finish(request_id)
        del self._texts[request_id]

    def _propose_chains(self, chains: list[Chain]) -> Draft:
        growing, feedback = [one for one in chains if one.grows], torch.empty(0, dtype=torch.float32)
        text = self._text_rows([_sequence(one.entry) for one in growing]) if growing else None
        if text is not None and chain.takes_likeliest(growing):
            tokens = self.runner.draft(*text, [one.most for one in growing])
            if tokens is not None:
                return chain.points(self.name, [one.most if one.grows else 0 for one in chains], tokens)
        while growing:
            if text is not None:
                output, text = self.runner.run(*text), None
            else:  # all that still grow are equally long
                tokens, place = torch.stack([one.tokens[-1] for one in growing]), len(growing[0].tokens) - 1
                segments = [Segment(_sequence(one.entry), 0, (*range(-1, place),), 1, place) for one in growing]
                output = self.runner.run(tokens, feedback, segments)
            chain.extend(growing, output.own_logits, output.vocabulary)
            kept = [i for i, one in enumerate(growing) if one.grows]
            feedback = output.feedback[to_device(kept, self.cache.device)]
            growing = [growing[i] for i in kept]
        return chain.assemble(self.name, self.cache.device, chains)

    def _propose_trees(self, growths: list[Growth]) -> Draft:
        growing = [one for one in growths if one.frontier and one.max_depth]
        feedback: dict[int, dict[int, Tensor]] = {}  # by sequence and node, [D]; of the text's last row it is node -1's
        while growing:
            if growing[0].level:  # all that still grow are equally deep
                output = self._run_level(growing, feedback)
            else:
                output = self.runner.run(*self._text_rows([_sequence(one.entry) for one in growing]))
            rows = iter(output.feedback.unbind())
            for one in growing:
                own = feedback.setdefault(_sequence(one.entry), {})
                own |= {node: next(rows) for node in one.frontier}
            branches.extend(growing, output.logits)
            growing = [one for one in growing if one.frontier and self._has_room(one)]
        return branches.assemble(self.name, self.cache.device, growths)

    def _run_level(self, growths: Sequence[Growth], feedback: dict[int, dict[int, Tensor]]) -> EagleOutput:
        """Run the frontier of every tree behind what has run of it."""
        tokens: list[int] = []
        features: list[Tensor] = []
        segments: list[Segment] = []
        for one in growths:
            tokens += [one.tokens[node] for node in one.frontier]
            features += [feedback[_sequence(one.entry)][one.parents[node]] for node in one.frontier]
            segments.append(one.segment())
        return self.runner.run(to_device(tokens, self.cache.device), torch.stack(features), segments)

    def _text_rows(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor, list[Segment]]:
        """What `runner.run` takes for what is missing of each text, the row before its last token at least: the
        prediction behind it. A long backlog runs at once, but for its end.
        """
        tokens: list[int] = []
        features: list[Tensor] = []
        segments: list[Segment] = []
        for sequence in sequences:
            text, stored = self._texts[sequence], self.kept[sequence].features
            stop = len(stored)
            num_missing = stop - self.cache.length(sequence)
            self.num_read_tokens += num_missing if num_missing > USUAL_TOKENS else 0
            if not num_missing:
                self.cache.rollback(sequence, stop - 1)
            while stop - (start := self.cache.length(sequence)) > _PIECE_TOKENS:
                piece = slice(start, start + _PIECE_TOKENS)
                ids = to_device(text[piece.start + 1 : piece.stop + 1], self.cache.device)
                rows = stored.between(piece.start, piece.stop)
                self.runner.run(ids, rows, [Segment(sequence, _PIECE_TOKENS, (), 0)])
            tokens += text[start + 1 : stop + 1]
            features.append(stored.between(start, stop))
            segments.append(Segment(sequence, stop - start))
        return to_device(tokens, self.cache.device), torch.cat(features), segments

    def _room(self, entry: BatchEntry) -> int:
        """How many tokens can follow one another in a draft for `entry`, within the head's context and cache."""
        sequence, num_rows = _sequence(entry), entry.round_start - 1
        if not entry.num_draft or not num_rows or self.kept[sequence].num_rows != num_rows:
            return 0  # rows that this step reads come between what is known and the last token
        # The last token of a draft is not run.
        most = min(entry.num_draft, self.runner.head.config.layer.max_context_tokens - num_rows + 1)
        missing = num_rows - self.cache.length(sequence)
        return most if most > 0 and self.make_room(sequence, missing + most - 1) else 0

    def _has_room(self, growth: Growth) -> bool:
        return self.cache.reserve(_sequence(growth.entry), len(growth.ran) + len(growth.frontier))


def _sequence(entry: BatchEntry) -> int:
    return entry.request.request_id


class MtpDrafter(EagleDrafter):
    """Chains or trees that the target's MTP layer draws under the request's own sampling parameters."""

    name = "mtp"

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        return cls(CachedEagle(*open_mtp(factory, spec)))
