"""Several drafters for one request: each round the most promising guesses, or the likeliest guesses of all in one tree.

Lookups guess first, since they cost nothing and say how sure they are. A part that asks a model is judged by what its
guesses were worth in earlier rounds, before it draws anything, so the choice is lawful for sampled guesses too
(BanditSpec, arXiv 2505.15141, and the ratio rule of goodput; SuffixDecoding's hybrid, arXiv 2411.04975, compares the
same two numbers). Times enter the choice, so under rules other than `greedy` and `coupled` the same seed may give
another answer of the same law.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict, empty_draft, merge_drafts
from foretoken.draft.base import Drafter, Feedback, Reads, Releases, Taps
from foretoken.draft.lookup_tree import Lookup
from foretoken.draft.merge import first_nodes, graft, share_of
from foretoken.draft.tree import TreeNode, merge_trees
from foretoken.draft.worth import Offer, PlaceAcceptance, Prices, Promise, Record

_TRIAL_TOKENS = 2  # what a model drafts that would not have been asked, or whose price is not known


@dataclass
class _Round:
    """What one request's round came to, by part: the tree of every lookup that could guess, the tokens asked of every
    model.
    """

    trees: dict[int, list[TreeNode]] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)  # by which the lookups' own estimates were corrected
    asked: dict[int, int] = field(default_factory=dict)
    found: Sequence[TreeNode] = ()  # deterministic guesses that may join
    num_drawn: int = 0  # nodes that come from models; they stand first
    added: Sequence[int] = ()  # those that did, in the order of the nodes behind them


class MixDrafter:
    """`parts` guess together, in the order of the requests' `spec.parts`; `clock` tells seconds."""

    name = "mix"

    def __init__(self, parts: Sequence[Drafter], clock: Callable[[], float] = time.perf_counter) -> None:
        self.parts, self._clock = tuple(parts), clock
        self.prices = Prices(len(parts))
        self._survivals = tuple(PlaceAcceptance() for _ in parts)  # over all requests, by part
        self._promises = tuple(Promise() for _ in parts)
        self.records: dict[int, tuple[Record, ...]] = {}  # by request
        self._rounds: dict[int, _Round] = {}
        self._proposed_s = 0.0
        self.num_read_tokens = 0  # see `base.Reads`: over the parts that were asked

    def start(self, request: Request) -> None:
        """Hand the request to every part, under that part's own configuration."""
        assert len(request.spec.configs) == len(self.parts)
        self.records[request.request_id] = tuple(
            Record(PlaceAcceptance(s), Promise(p)) for s, p in zip(self._survivals, self._promises, strict=True)
        )
        for part, spec in zip(self.parts, request.spec.configs, strict=True):
            part.start(replace(request, spec=spec))

    def propose(self, batch: Batch) -> Draft:
        """Choose who guesses for every request, then let them."""
        entries = batch.decoding
        rounds = [self._plan(entry, len(entries)) for entry in entries]
        base = self._draw(entries, rounds)
        draft, added = graft(
            self.name, base, [round_.found for round_ in rounds], [entry.num_draft for entry in entries]
        )
        for b, round_ in enumerate(rounds):
            round_.num_drawn, round_.added = base.lengths[b], added[b]
            self._rounds[entries[b].request.request_id] = round_
        self._proposed_s = self._clock()
        return draft

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Tell every part what was emitted, and learn what the guesses were worth."""
        entries = batch.decoding
        rounds = [self._rounds.pop(entry.request.request_id, None) for entry in entries]
        if any(rounds):
            self.prices.step.observe(feedback.logits.shape[0], self._clock() - self._proposed_s)
        for b, round_ in enumerate(rounds):
            if round_ is not None:
                self._learn(self.records[entries[b].request.request_id], round_, verdict.paths[b])
        for index, part in enumerate(self.parts):
            own = Batch(tuple(self._entry(entry, index, entry.num_draft) for entry in entries))
            drawn = [
                round_.num_drawn if round_ is not None and index in round_.asked else draft.lengths[b]
                for b, round_ in enumerate(rounds)
            ]
            if isinstance(part, Lookup) or drawn == list(draft.lengths):
                part.commit(own, draft, verdict, feedback)
            else:
                _commit_in_turns(part, own, draft, verdict, feedback, drawn)

    def taps(self) -> tuple[int, ...]:
        """Layers whose residual stream some part wants."""
        return tuple(sorted({layer for part in self.parts if isinstance(part, Taps) for layer in part.taps()}))

    def release(self, request_id: int) -> None:
        """See `base.Releases`: every part that has a cache."""
        for part in self.parts:
            if isinstance(part, Releases):
                part.release(request_id)

    def finish(self, request_id: int) -> None:
        """Let every part forget the request."""
        del self.records[request_id]
        self._rounds.pop(request_id, None)
        for part in self.parts:
            part.finish(request_id)

    def _plan(self, entry: BatchEntry, num_requests: int) -> _Round:
        """Who guesses for a request: nothing has been drawn yet."""
        round_ = _Round()
        if not entry.num_draft:
            return round_
        records, spec = self.records[entry.request.request_id], entry.request.spec
        merges = spec.combine == "merge" and entry.takes_trees
        for index, part in enumerate(self.parts):
            if isinstance(part, Lookup):
                tree = part.guess(self._entry(entry, index, spec.configs[index].at_most(entry.num_draft)))
                if tree.tokens:
                    factor = round_.factors[index] = records[index].promise.factor
                    nodes = zip(tree.tokens, tree.parents, tree.chances, strict=True)
                    round_.trees[index] = [
                        TreeNode(token, parent, factor * chance, part.name) for token, parent, chance in nodes
                    ]
        if merges:
            self._plan_merged(entry, round_, records)
        else:
            self._plan_best(entry, round_, records, num_requests)
        return round_

    def _plan_best(self, entry: BatchEntry, round_: _Round, records: Sequence[Record], num_requests: int) -> None:
        """One part guesses: the one that is due, else the one with the most expected tokens per second, which may be
        none.
        """
        spec = entry.request.spec
        offers = {
            index: Offer(index, sum(node.estimate for node in tree), len(tree)) for index, tree in round_.trees.items()
        }
        for index, part in enumerate(self.parts):
            most = spec.configs[index].at_most(entry.num_draft)
            if not isinstance(part, Lookup) and most:
                _, emitted = records[index].survival.shares(most)
                price = self.prices.parts[index]
                depths: Sequence[int] = (most,)  # a number that the caller set stands
                if spec.num_draft == "auto":
                    trial = price.is_empty or records[index].is_due
                    depths = (min(_TRIAL_TOKENS, most),) if trial else range(1, most + 1)
                choices = [Offer(index, sum(emitted[:n]), n, price.seconds(n) / num_requests) for n in depths]
                offers[index] = self.prices.best(choices, num_requests)
        due = [index for index in offers if records[index].is_due]
        nothing = [Offer(-1, 0.0, 0)] if spec.num_draft == "auto" and not due else []
        candidates = [offers[index] for index in due or offers]
        chosen = self.prices.best([*candidates, *nothing], num_requests) if candidates else Offer(-1, 0.0, 0)
        if chosen.part in round_.trees:
            round_.found = round_.trees[chosen.part]
        elif chosen.part >= 0:
            round_.asked[chosen.part] = chosen.num_rows
        for index in offers:
            records[index].idle_rounds = 0 if index == chosen.part else records[index].idle_rounds + 1

    def _plan_merged(self, entry: BatchEntry, round_: _Round, records: Sequence[Record]) -> None:
        """The likeliest guesses of all: how many of them a model draws is settled here, by how earlier ones at their
        places survived.
        """
        round_.found = merge_trees(list(round_.trees.values()), sum(map(len, round_.trees.values())))
        for index, part in enumerate(self.parts):
            most = entry.request.spec.configs[index].at_most(entry.num_draft)
            if isinstance(part, Lookup) or not most:
                continue
            _, emitted = records[index].survival.shares(most)
            count = share_of(emitted, round_.found, entry.num_draft)
            if not count and records[index].is_due:
                count = min(_TRIAL_TOKENS, most)
            records[index].idle_rounds = 0 if count else records[index].idle_rounds + 1
            if count:
                round_.asked[index] = count

    def _draw(self, entries: Sequence[BatchEntry], rounds: Sequence[_Round]) -> Draft:
        """Ask the models that were chosen, each for all its requests at once."""
        drafts: list[tuple[list[int], Draft]] = []
        self.num_read_tokens = 0
        for index, part in enumerate(self.parts):
            asked = {b: round_.asked[index] for b, round_ in enumerate(rounds) if index in round_.asked}
            if not asked:
                continue
            began = self._clock()
            drafts.append(
                (
                    list(asked),
                    part.propose(Batch(tuple(self._entry(entries[b], index, count) for b, count in asked.items()))),
                )
            )
            num_read = part.num_read_tokens if isinstance(part, Reads) else 0
            self.num_read_tokens += num_read
            records = [self.records[entries[b].request.request_id][index] for b in asked]
            # The first time it reads the prompt, later what it missed: that says nothing about the next time.
            if not num_read and all(record.was_asked for record in records):
                self.prices.parts[index].observe(max(asked.values()), self._clock() - began)
            for record in records:
                record.was_asked = True
        if not drafts:
            return empty_draft(len(entries))
        return merge_drafts(len(entries), drafts, drafts[0][1].tokens.device)

    def _learn(self, records: Sequence[Record], round_: _Round, path: Sequence[int]) -> None:
        """Compare what stood, the nodes of `path`, with what was expected."""
        for index, count in round_.asked.items():
            for survival in (records[index].survival, self._survivals[index]):
                survival.observe(count, [float(node in path) for node in range(round_.num_drawn)])
        joined = [(round_.found[place], node in path) for node, place in enumerate(round_.added, round_.num_drawn)]
        for index, factor in round_.factors.items():
            own = [
                (guess.estimate / factor, stood) for guess, stood in joined if guess.author == self.parts[index].name
            ]
            if own:
                for promise in (records[index].promise, self._promises[index]):
                    promise.observe(sum(chance for chance, _ in own), float(sum(stood for _, stood in own)))

    def _entry(self, entry: BatchEntry, part: int, num_draft: int) -> BatchEntry:
        """What a part is asked."""
        return replace(
            entry, request=replace(entry.request, spec=entry.request.spec.configs[part]), num_draft=num_draft
        )


def _commit_in_turns(
    part: Drafter, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback, counts: Sequence[int]
) -> None:
    """Tell a part that guessed only the first `counts[b]` nodes of each request: a round over those, then a round for
    every token more.

    So no part is ever told that it guessed what it did not.
    """
    emitted = [verdict.emitted(b) for b in range(draft.num_requests)]
    kept = [tuple(node for node in path if node < count) for path, count in zip(verdict.paths, counts, strict=True)]
    own = Verdict(
        tuple(kept),
        tuple(tokens[: len(path)] for tokens, path in zip(emitted, kept, strict=True)),
        tuple(tokens[len(path)] for tokens, path in zip(emitted, kept, strict=True)),
        verdict.next_kinds,
    )
    rows = [feedback.rows[draft.anchor_row(b) + row] for b, count in enumerate(counts) for row in range(1 + count)]
    part.commit(batch, first_nodes(draft, counts), own, replace(feedback, rows=tuple(rows)))
    done = [1 + len(path) for path in kept]
    while left := [b for b, tokens in enumerate(emitted) if done[b] < len(tokens)]:
        entries = tuple(
            replace(entry, start=entry.round_start + done[b] - 1, pending=(emitted[b][done[b] - 1],), num_draft=0)
            for b, entry in ((b, batch.decoding[b]) for b in left)
        )
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(left)
        one = Verdict(
            nothing, nothing, tuple(emitted[b][done[b]] for b in left), tuple(verdict.next_kinds[b] for b in left)
        )
        rows = [feedback.rows[draft.anchor_row(b) + 1 + verdict.paths[b][done[b] - 1]] for b in left]
        part.commit(Batch(entries), empty_draft(len(left)), one, replace(feedback, rows=tuple(rows)))
        for b in left:
            done[b] += 1
