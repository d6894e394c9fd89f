"""A drafter that is watched: every call keeps the contract of `draft.base.Drafter`, or the test fails on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Drafter, Feedback, FollowsText, HiddenRows, PrefixStates, Reads, Releases
from foretoken.draft.block import BlockDrafter
from foretoken.draft.cascade import CascadeDrafter
from foretoken.draft.draft_model import DraftModelDrafter
from foretoken.draft.eagle import EagleDrafter, MtpDrafter
from foretoken.draft.early_exit import EarlyExitDrafter
from foretoken.draft.hidden_states import reads_hidden_states
from foretoken.draft.lookahead import MAX_CONTINUATIONS, MAX_TOKENS, LookaheadDrafter
from foretoken.draft.medusa import MedusaDrafter
from foretoken.draft.mix import MixDrafter
from foretoken.draft.ngram import NgramDrafter
from foretoken.draft.other_vocabulary import OtherVocabularyDrafter
from foretoken.draft.predicted import PredictedDrafter
from foretoken.draft.recycling import NUM_RANKS, RecyclingDrafter
from foretoken.draft.retokenize import DraftText
from foretoken.draft.suffix import SuffixDrafter
from foretoken.kv.blocks import slots_of
from foretoken.model.interface import Segment
from foretoken.model.paged import PagedModel


class Watched:
    """`inner` with checks around every call; `texts` is what it was told of every request."""

    def __new__(cls, inner: Drafter, vocab_size: int) -> Watched:
        return object.__new__(WatchedReader if reads_hidden_states(type(inner)) else cls)

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self.inner, self.name, self.vocab_size = inner, inner.name, vocab_size
        self.texts: dict[int, list[int]] = {}
        self.num_drafted = self.num_full_rounds = self.num_trees = self.num_probed = self.num_walks = (
            self.num_walks_to_a_leaf
        ) = 0
        if isinstance(inner, FollowsText):
            self.keeps_answers = inner.keeps_answers
            self.follow = self._follow  # on the instance: the engine asks each drafter whether it follows

    def _follow(self, request_id: int, tokens: Sequence[int]) -> None:
        assert isinstance(self.inner, FollowsText)
        assert tokens, "nothing to follow"
        self.texts[request_id] += tokens
        self.inner.follow(request_id, tokens)
        STATE_CHECKS[type(self.inner)](self.inner, request_id, self.texts[request_id], 0, 0)

    def start(self, request: Request) -> None:
        self.texts[request.request_id] = list(request.prompt_ids)
        self.inner.start(request)

    def propose(self, batch: Batch) -> Draft:
        for entry in batch.decoding:
            assert entry.round_start == len(self.texts[entry.request.request_id]), "the drafter missed a token"
        draft = self.inner.propose(batch)
        check_draft(draft, batch, self.name, self.vocab_size)
        self.num_drafted += draft.num_nodes
        self.num_probed += sum(draft.probe_lengths)
        self.num_trees += sum(not draft.is_chain(b) for b in range(draft.num_requests))
        return draft

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        for b, entry in enumerate(batch.decoding):
            self.texts[entry.request.request_id] += verdict.emitted(b)
            self.num_full_rounds += 0 < draft.lengths[b] == len(verdict.accepted[b])
            self.num_walks += draft.lengths[b] > 0
            self.num_walks_to_a_leaf += draft.lengths[b] > 0 and not goes_on(draft, b, verdict.paths[b])
        self.inner.commit(batch, draft, verdict, feedback)
        if isinstance(self.inner, RecyclingDrafter):
            check_matrix(self.inner, batch, draft, verdict, feedback)
        for b, entry in enumerate(batch.decoding):
            sequence, num_accepted = entry.request.request_id, len(verdict.accepted[b])
            # A tree counts as its accepted path and, if that does not end at a leaf, one draft token more.
            num_drafted = draft.lengths[b] if draft.is_chain(b) else num_accepted + goes_on(draft, b, verdict.paths[b])
            STATE_CHECKS[type(self.inner)](self.inner, sequence, self.texts[sequence], num_drafted, num_accepted)

    @property
    def num_read_tokens(self) -> int:
        return self.inner.num_read_tokens if isinstance(self.inner, Reads) else 0

    def release(self, request_id: int) -> None:
        if isinstance(self.inner, Releases):
            self.inner.release(request_id)

    def finish(self, request_id: int) -> None:
        del self.texts[request_id]
        self.inner.finish(request_id)


class WatchedReader(Watched):
    """The same of a drafter that reads hidden states."""

    @property
    def reader(self) -> PrefixStates:
        assert isinstance(self.inner, PrefixStates)
        return self.inner

    def hidden_layers(self) -> tuple[int, ...]:
        return self.reader.hidden_layers()

    def read_hidden(self, rows: Sequence[HiddenRows]) -> None:
        self.reader.read_hidden(rows)

    def export_states(self, request_id: int, start: int, stop: int) -> object:
        return self.reader.export_states(request_id, start, stop)

    def adopt_states(self, request_id: int, blocks: Sequence[object]) -> None:
        self.reader.adopt_states(request_id, blocks)


def goes_on(draft: Draft, request: int, path: tuple[int, ...]) -> bool:
    """Whether something was drafted after the end of a path."""
    return (path[-1] if path else -1) in draft.parents[draft.offsets[request] : draft.offsets[request + 1]]


def check_draft(draft: Draft, batch: Batch, name: str, vocab_size: int) -> None:
    """Shape, limits, names and distributions of a draft."""
    entries = batch.decoding
    assert draft.num_requests == len(entries)
    assert all(0 <= token < vocab_size for token in draft.tokens.tolist())
    for b, entry in enumerate(entries):
        assert draft.lengths[b] <= entry.num_draft, "more than was asked for"
        tossed = (
            draft.mass is not None and draft.mass.distribution_of_row[draft.anchor_row(b)] >= 0
        )  # a coin may have said no at once
        named = [name] if draft.lengths[b] or tossed else [name, None] if entry.num_draft else [None]
        assert draft.drafters[b] in named, "who ran is named, also where it was too unsure to draft"
        own = draft.parents[draft.offsets[b] : draft.offsets[b + 1]]
        assert all(-1 <= parent < node for node, parent in enumerate(own)), "a parent comes before its child"
        assert entry.takes_trees or draft.is_chain(b), "the rule takes chains only"
        siblings = list(zip(own, draft.tokens[draft.offsets[b] : draft.offsets[b + 1]].tolist(), strict=True))
        assert len(set(siblings)) == len(siblings), "one draft token is there twice"
        check_probes(draft, b, entry.num_probe, entry.probe_depth, vocab_size)
    if draft.mass is None:
        return
    distributions = draft.mass.distributions
    assert distributions.dtype in (torch.float32, torch.float64)
    assert bool((distributions >= 0).all())
    assert bool((distributions.sum(-1) <= 1 + 1e-5).all())
    assert len(draft.mass.distribution_of_row) == draft.num_rows
    for node, sampled in enumerate(draft.sampled):
        if sampled:
            distribution = draft.mass.distribution_of_row[draft.parent_rows[node]]
            assert distribution >= 0
            assert distributions[distribution, draft.tokens[node]] > 0, (
                "a token outside the distribution it was drawn from"
            )


def check_probes(draft: Draft, b: int, num_probe: int, probe_depth: int, vocab_size: int) -> None:
    """As many as allowed, a tree of their own, none beyond the context."""
    assert draft.probe_lengths[b] <= num_probe
    if not draft.probe_lengths[b]:
        return
    assert draft.probes is not None
    one = draft.probes.select([b])
    assert all(0 <= token < vocab_size for token in one.tokens.tolist())
    depths: list[int] = []
    for node, parent in enumerate(one.parents):
        assert -1 <= parent < node
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) <= probe_depth


def check_lookahead_state(
    drafter: LookaheadDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The end of the text is known, the window is whole, the pool holds no more than it may and the text's last
    n-gram.
    """
    state = drafter._requests[sequence]
    span = state.window.depth + 1
    assert list(state.recent) == text[-span:]
    assert [len(column) for column in state.window.columns] == [state.window.depth] * state.window.width
    assert len(state.pool._found) <= MAX_TOKENS
    assert all(len(own) <= MAX_CONTINUATIONS for own in state.pool._found.values())


def check_index_state(
    drafter: NgramDrafter | SuffixDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The index holds the whole text and nothing else."""
    index = drafter._indexes[sequence]
    assert index.end(index.num_tokens) == text


def check_predicted_state(
    drafter: PredictedDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The cursor has seen the end of the text."""
    recent = drafter._indexes[sequence]._recent
    assert recent == tuple(text[len(text) - len(recent) :])


def check_recycling_state(
    drafter: RecyclingDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """Nothing is kept for a request; `check_matrix` looks at the rest."""


def check_matrix(drafter: RecyclingDrafter, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
    """After a round every token of a row is followed by what the target found likeliest there: in the last request's
    deepest accepted row that holds it, or if none does in any of its rows."""
    tops = feedback.logits[list(feedback.rows)].topk(NUM_RANKS, dim=-1).indices.tolist()
    tokens = draft.tokens.tolist()
    expected: dict[int, list[list[int]]] = {}
    for b, entry in enumerate(batch.decoding):
        first = draft.offsets[b] + b
        own = {entry.pending[-1]: [tops[first]]}
        for node in range(draft.lengths[b]):
            own.setdefault(tokens[draft.offsets[b] + node], []).append(tops[first + 1 + node])
        own[entry.pending[-1]] = [tops[first]]
        own.update(
            {token: [tops[first + 1 + node]] for token, node in zip(verdict.accepted[b], verdict.paths[b], strict=True)}
        )
        expected.update(own)
    for token, allowed in expected.items():
        assert drafter.successors[token].tolist() in allowed


def check_draft_model_state(
    drafter: DraftModelDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """I1 and I3: the drafter knows the text; after a round one token waits, two after the accepted end of a draft."""
    assert drafter._texts[sequence] == text
    if num_drafted:
        assert 1 <= len(text) - drafter.model.length(sequence) <= (2 if num_accepted == num_drafted else 1)


def check_early_exit_state(
    drafter: EarlyExitDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """Nothing ran early that the target still holds, and its cache is the text without the anchor."""
    assert drafter.target.length(sequence) == len(text) - 1
    assert sequence not in getattr(drafter.target, "_early", {})


def check_other_vocabulary_state(
    drafter: OtherVocabularyDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The draft's tokens are those of a fresh encoding of the whole text; its cache holds some of them, never the
    last.
    """
    fresh = DraftText(drafter.target.tokenizer, drafter.draft, drafter._twins.to_draft, 10**9)
    fresh.push(text)
    ids, cached = drafter._texts[sequence].ids, drafter._cached[sequence]
    assert ids == fresh.ids
    assert cached == ids[: len(cached)]
    assert drafter.model.length(sequence) == len(cached) <= max(0, len(ids) - 1)


def check_cascade_state(
    drafter: CascadeDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """I1 and I3 at every level: its cache is a part of the text, without the anchor; what ran ahead of the text is
    forgotten.
    """
    assert drafter._texts[sequence] == text
    for level in drafter.levels:
        assert level.model.length(sequence) < len(text)
        assert not level.ran[sequence]
    if num_drafted:
        missing = 2 if num_accepted == num_drafted else 1
        assert drafter.levels[-1].model.length(sequence) == len(text) - missing, (
            "the last level ran all that was accepted"
        )
    if drafter.lookup is not None:
        STATE_CHECKS[type(drafter.lookup)](drafter.lookup, sequence, text, num_drafted, num_accepted)


def check_mix_state(drafter: MixDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int) -> None:
    """Every part knows the whole text, whichever drafted."""
    assert not drafter._drawn
    for part in drafter.parts:
        STATE_CHECKS[type(part)](part, sequence, text, 0, 0)


def check_medusa_state(
    drafter: MedusaDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The newest state is that before the anchor, wherever the target has run the text so far."""
    own = drafter._requests[sequence]
    assert own.tree is None
    assert own.stop in (0, len(text) - 1)


def check_block_state(
    drafter: BlockDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """States of the whole text before the anchor; the cache holds some of them, and no slot."""
    own = drafter.kept[sequence]
    assert own.num_rows in (0, len(text) - 1)
    assert drafter.cache.length(sequence) <= len(own.features) <= own.num_rows


def check_eagle_state(
    drafter: EagleDrafter, sequence: int, text: list[int], num_drafted: int, num_accepted: int
) -> None:
    """The text; states of all of it before the anchor; the cache holds rows of some of them, and no draft token."""
    own = drafter.kept[sequence]
    assert drafter._texts[sequence][: len(text)] == text
    assert own.num_rows in (0, len(text) - 1)
    assert drafter.cache.length(sequence) <= len(own.features) <= own.num_rows


# A new drafter adds a line.
STATE_CHECKS: dict[type, Callable[[Any, int, list[int], int, int], None]] = {
    NgramDrafter: check_index_state,
    SuffixDrafter: check_index_state,
    PredictedDrafter: check_predicted_state,
    RecyclingDrafter: check_recycling_state,
    LookaheadDrafter: check_lookahead_state,
    DraftModelDrafter: check_draft_model_state,
    EarlyExitDrafter: check_early_exit_state,
    OtherVocabularyDrafter: check_other_vocabulary_state,
    CascadeDrafter: check_cascade_state,
    MixDrafter: check_mix_state,
    MedusaDrafter: check_medusa_state,
    BlockDrafter: check_block_state,
    EagleDrafter: check_eagle_state,
    MtpDrafter: check_eagle_state,
}


def check_cache(model: PagedModel, sequence: int, text: list[int], tolerance: float = 1e-4) -> None:
    """The cache of `sequence` holds exactly what a fresh run over its text would write."""
    length = model.length(sequence)
    if not length:
        return
    model.open(-7)
    model.forward(torch.tensor(text[:length]), [Segment(-7, length, (), 0)])
    model.commit(-7, length)
    held, fresh = ([*slots_of(model.tables[s], 0, length, model.block_size)] for s in (sequence, -7))
    for tensor in (*model.pool.keys, *model.pool.values):
        torch.testing.assert_close(tensor[:, held], tensor[:, fresh], atol=tolerance, rtol=0)
    model.close(-7)
