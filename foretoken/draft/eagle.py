"""An EAGLE head guesses token by token from the target's hidden states (EAGLE-1, Li et al. 2401.15077; EAGLE-3, Li et
al. 2503.01840), as a chain or, as EAGLE-2 does (Li et al. 2406.16858), as a tree that grows where it is surest.

Hidden states of committed positions are kept as they come, and read when something is drafted: a request that is not
drafted for costs next to nothing. The head's keys and values of the text stay in a cache of its own and can be made
again from what is kept, so that a request that needs room takes it from one that has not drafted for longest. Those of
guesses are forgotten each round: accepted tokens come back as the target's own states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict, merge_drafts
from foretoken.draft import branches, chain
from foretoken.draft.base import Factory, Feedback, HiddenRows, product_of
from foretoken.draft.branches import Growth
from foretoken.draft.chain import PROBABILITIES, Chain
from foretoken.draft.open_head import open_head
from foretoken.draft.stored_rows import StoredRows
from foretoken.heads.eagle import EagleHead
from foretoken.heads.eagle_cache import CachedEagle, EagleGuess
from foretoken.model.interface import LanguageModel, Segment, SharesWeights
from foretoken.transfer import to_device

_USUAL_TOKENS = 8  # rows of committed text that any round may bring; more of them count as reading
_MOST_UNREAD = 64  # deliveries of states that a request not drafted for keeps as they came
_PIECE_TOKENS = 512  # rows of a long backlog that one pass takes


@dataclass
class _Known:
    """What is known of a request: its text, the `features` of its first positions, and states read since."""

    text: list[int]
    features: StoredRows = field(default_factory=StoredRows)
    unread: list[HiddenRows] = field(default_factory=list)
    used: int = 0  # round in which it last drafted

    @property
    def num_rows(self) -> int:
        """Positions whose states are known."""
        return self.unread[-1].stop if self.unread else len(self.features)


class EagleDrafter:
    """Chains or trees that a trained EAGLE head draws under the request's own sampling parameters."""

    name = "eagle"
    keeps_answers = False  # see `base.FollowsText`

    def __init__(self, runner: CachedEagle) -> None:
        self.runner, self.cache = runner, runner.cache
        self._known: dict[int, _Known] = {}
        self._round = 0
        self.num_read_tokens = 0  # see `base.Reads`

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`.

        Raises:
            ConfigError, CheckpointError, MismatchError, UnsupportedModelError: see `open_head`.
        """
        head, target = open_head(factory, spec, cls.name)
        assert isinstance(head, EagleHead)
        return cls(CachedEagle(head, target))

    def models(self) -> Sequence[LanguageModel]:
        """See `base.ModelDrafter`: none beside the target."""
        return ()

    def fresh(self, twin: Callable[[LanguageModel], LanguageModel]) -> Self:
        """See `base.ModelDrafter`."""
        target = twin(self.runner.target)
        assert isinstance(target, SharesWeights)
        return type(self)(CachedEagle(self.runner.head, target, self.cache.twin_cache()))

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: the chance that a position is drafted."""
        return product_of(spec, PROBABILITIES if spec.draft_probability == "auto" else {})

    def hidden_layers(self) -> tuple[int, ...]:
        """See `base.HiddenStateReader`."""
        return self.runner.head.hidden_layers()

    def start(self, request: Request) -> None:
        """Keep room for what will be known of a request."""
        self._known[request.request_id] = _Known(list(request.prompt_ids))
        self.cache.open(request.request_id)

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """See `base.HiddenStateReader`: states, and with them the text as far as the token behind them."""
        for one in rows:
            own = self._known[one.request_id]
            assert one.start == own.num_rows, "a position is missing, or comes twice"
            own.unread.append(one)
            own.text[one.start :] = [*one.tokens, one.next_token, *own.text[one.stop + 1 :]]
            if len(own.unread) >= _MOST_UNREAD:
                self._make_features([one.request_id])

    def propose(self, batch: Batch) -> Draft:
        """Guess up to `num_draft` tokens per request, all requests together; none where the cache has no room, or the
        states of the text are not complete.
        """
        entries = batch.decoding
        self._round += 1
        self.num_read_tokens = 0
        for entry in entries:
            if entry.num_draft:
                self._known[entry.request.request_id].used = self._round
        most = [self._room(entry) for entry in entries]
        self._make_features([entry.request.request_id for b, entry in enumerate(entries) if most[b]])
        with_tree = [b for b, entry in enumerate(entries) if entry.takes_trees and entry.request.spec.tree != "chain"]
        others = [b for b in range(len(entries)) if b not in with_tree]
        chains = self._propose_chains([Chain(entries[b], most[b]) for b in others])
        if not with_tree:
            return chains
        trees = self._propose_trees([Growth(entries[b], entries[b].num_draft, most[b]) for b in with_tree])
        return merge_drafts(len(entries), [(others, chains), (with_tree, trees)], self.cache.device)

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Nothing: what was emitted comes as hidden states."""

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`: what was emitted comes as hidden states."""

    def release(self, request_id: int) -> None:
        """See `base.Releases`: the states come again."""
        self.cache.rollback(request_id, 0)
        own = self._known[request_id]
        own.features, own.unread = StoredRows(), []

    @property
    def head(self) -> EagleHead:
        """See `base.AdaptableDrafter`."""
        return self.runner.head

    @property
    def fixed_weights(self) -> tuple[str, ...]:
        """See `base.AdaptableDrafter`: those of `EagleHead.features`; version 1 keeps the target's own states."""
        return ("fc.", "fc_norm.", "input_norm.") if self.runner.head.config.version == 3 else ()

    def drop_computed(self) -> None:
        """See `base.AdaptableDrafter`: keys and values are made again from the features."""
        for sequence in self._known:
            self.cache.rollback(sequence, 0)

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        del self._known[request_id]
        self.cache.close(request_id)

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        """See `base.PrefixStates`: features [stop - start, D], each of its own position alone."""
        self._make_features([request_id])
        return self._known[request_id].features.between(start, stop).clone()

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        """See `base.PrefixStates`."""
        for block in blocks:
            assert isinstance(block, Tensor)
            self._known[request_id].features.append(block)

    def _propose_chains(self, chains: list[Chain]) -> Draft:
        growing, feedback = [one for one in chains if one.grows], torch.empty(0)
        while growing:
            if growing[0].tokens:  # all that still grow are equally long
                tokens, place = torch.stack([one.tokens[-1] for one in growing]), len(growing[0].tokens) - 1
                segments = [Segment(_sequence(one.entry), 0, (*range(-1, place),), 1, place) for one in growing]
                guess = self.runner.run(tokens, feedback, segments)
            else:
                guess = self._run_text([_sequence(one.entry) for one in growing])
            chain.extend(growing, guess.logits)
            kept = [i for i, one in enumerate(growing) if one.grows]
            feedback = guess.feedback[to_device(kept, self.cache.device)]
            growing = [growing[i] for i in kept]
        return chain.assemble(self.name, self.cache.device, chains)

    def _propose_trees(self, growths: list[Growth]) -> Draft:
        growing = [one for one in growths if one.frontier and one.max_depth]
        feedback: dict[int, dict[int, Tensor]] = {}  # by sequence and node, [D]; of the text's last row it is node -1's
        while growing:
            if growing[0].level:  # all that still grow are equally deep
                guess = self._run_level(growing, feedback)
            else:
                guess = self._run_text([_sequence(one.entry) for one in growing])
            rows = iter(guess.feedback.unbind())
            for one in growing:
                own = feedback.setdefault(_sequence(one.entry), {})
                own |= {node: next(rows) for node in one.frontier}
            branches.extend(growing, guess.logits)
            growing = [one for one in growing if one.frontier and self._has_room(one)]
        return branches.assemble(self.name, self.cache.device, growths)

    def _run_level(self, growths: Sequence[Growth], feedback: dict[int, dict[int, Tensor]]) -> EagleGuess:
        """Run the frontier of every tree behind what has run of it."""
        tokens: list[int] = []
        features: list[Tensor] = []
        segments: list[Segment] = []
        for one in growths:
            sequence, nodes = _sequence(one.entry), (*one.ran, *one.frontier)
            place = {-1: -1} | {node: number for number, node in enumerate(nodes)}
            parents = tuple(place[one.parents[node]] for node in nodes)
            tokens += [one.tokens[node] for node in one.frontier]
            features += [feedback[sequence][one.parents[node]] for node in one.frontier]
            segments.append(Segment(sequence, 0, parents, len(one.frontier), len(one.ran)))
        return self.runner.run(to_device(tokens, self.cache.device), torch.stack(features), segments)

    def _run_text(self, sequences: Sequence[int]) -> EagleGuess:
        """Run what is missing of each text, the row before its last token at least: the guess behind that token."""
        tokens: list[int] = []
        features: list[Tensor] = []
        segments: list[Segment] = []
        for sequence in sequences:
            own = self._known[sequence]
            stop = len(own.features)
            num_missing = stop - self.cache.length(sequence)
            self.num_read_tokens += num_missing if num_missing > _USUAL_TOKENS else 0
            if not num_missing:
                self.cache.rollback(sequence, stop - 1)
            while stop - (start := self.cache.length(sequence)) > _PIECE_TOKENS:
                piece = slice(start, start + _PIECE_TOKENS)
                ids = to_device(own.text[piece.start + 1 : piece.stop + 1], self.cache.device)
                rows = own.features.between(piece.start, piece.stop)
                self.runner.run(ids, rows, [Segment(sequence, _PIECE_TOKENS, (), 0)])
            tokens += own.text[start + 1 : stop + 1]
            features.append(own.features.between(start, stop))
            segments.append(Segment(sequence, stop - start))
        return self.runner.run(to_device(tokens, self.cache.device), torch.cat(features), segments)

    def _make_features(self, sequences: Sequence[int]) -> None:
        """Make features of all states that some requests have read, in one call."""
        unread = [(self._known[one], rows) for one in sequences for rows in self._known[one].unread]
        if not unread:
            return
        states = {layer: torch.cat([rows.states[layer] for _, rows in unread]) for layer in self.hidden_layers()}
        pieces = self.runner.features(states).split_with_sizes([len(rows.tokens) for _, rows in unread])
        for (own, _), piece in zip(unread, pieces, strict=True):
            own.features.append(piece)
        for one in sequences:
            self._known[one].unread.clear()

    def _room(self, entry: BatchEntry) -> int:
        """How many tokens can follow one another in a draft for `entry`, within the head's context and cache."""
        sequence, num_rows = _sequence(entry), entry.round_start - 1
        if not entry.num_draft or not num_rows or self._known[sequence].num_rows != num_rows:
            return 0  # rows that this step reads come between what is known and the last token
        # The last token of a draft is not run.
        most = min(entry.num_draft, self.runner.head.config.layer.max_context_tokens - num_rows + 1)
        return most if most > 0 and self._make_room(sequence, num_rows + most - 1) else 0

    def _make_room(self, sequence: int, num_rows: int) -> bool:
        """Room for so many rows in all, with what requests hold that do not draft in this round if need be."""
        if self.cache.reserve(sequence, num_rows - self.cache.length(sequence)):
            return True
        idle = [one for one, own in self._known.items() if own.used < self._round and self.cache.length(one)]
        for one in sorted(idle, key=lambda one: self._known[one].used):
            self.cache.rollback(one, 0)
            if self.cache.reserve(sequence, num_rows - self.cache.length(sequence)):
                return True
        return False

    def _has_room(self, growth: Growth) -> bool:
        """Whether the cache has room for a tree's next level."""
        return self.cache.reserve(_sequence(growth.entry), len(growth.ran) + len(growth.frontier))


def _sequence(entry: BatchEntry) -> int:
    return entry.request.request_id
