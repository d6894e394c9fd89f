"""Lookahead decoding: the target predicts several places ahead in parallel, and what it says there is kept as n-grams.

Fu et al. 2024 (arXiv 2402.02057; `hao-ai-lab/LookaheadDecoding`). Behind the anchor stands a window of tokens; in every
round the target runs them as probes (`core.Probes`), and its answers are the window of the next round: a Jacobi
iteration. What one column says in successive rounds is an n-gram that the target itself has written. It enters a pool;
when its first token comes, the rest is drafted. These tokens are deterministic, so any rule keeps them exact.

The window costs rows of the target. With `lookahead_window="auto"` the engine chooses in each round whether it is run
(`base.Variants`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from foretoken.config import LOOKAHEAD_WINDOW, SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Probes, Request, Verdict
from foretoken.draft.base import Feedback, product_of
from foretoken.draft.lookup_tree import EMPTY, LookupDrafter, LookupTree
from foretoken.draft.tree import TreeNode, merge_trees
from foretoken.transfer import to_host

MAX_CONTINUATIONS = 4  # of one token, in the pool
MAX_TOKENS = 1024  # with continuations, in the pool of one request
# Chances before anything was counted, in tries: that the first token of the r-th latest continuation of a token follows
# it, and that a later token of a continuation does once the one before it did.
_PRIOR_TRIES = 8
_PRIOR_FIRST = (0.3, 0.15, 0.1, 0.05)
_PRIOR_NEXT = 0.6


class NgramPool:
    """What followed single tokens: for each the latest continuations, for the latest tokens only."""

    def __init__(self) -> None:
        self._found: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()

    def add(self, token: int, continuation: tuple[int, ...]) -> None:
        """Make `continuation` the latest one of `token`; the oldest of too many is dropped."""
        own = self._found.setdefault(token, {})
        own.pop(continuation, None)
        own[continuation] = None
        self._found.move_to_end(token)
        if len(own) > MAX_CONTINUATIONS:
            del own[next(iter(own))]
        if len(self._found) > MAX_TOKENS:
            self._found.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Continuations of `token`, latest first."""
        return list(reversed(self._found.get(token, {})))


@dataclass
class ContinuationChances:
    """How often continuations from the pool came true in this request's text, over all tokens emitted."""

    tries: list[float] = field(default_factory=lambda: [float(_PRIOR_TRIES)] * MAX_CONTINUATIONS)
    hits: list[float] = field(default_factory=lambda: [_PRIOR_TRIES * chance for chance in _PRIOR_FIRST])
    next_tries: float = _PRIOR_TRIES
    next_hits: float = _PRIOR_TRIES * _PRIOR_NEXT

    def count(self, continuations: Sequence[Sequence[int]], emitted: Sequence[int]) -> None:
        """Compare the continuations of a token, latest first, with what was emitted after it."""
        for rank, continuation in enumerate(continuations):
            self.tries[rank] += 1
            if continuation[0] != emitted[0]:
                continue
            self.hits[rank] += 1
            for said, token in zip(continuation[1:], emitted[1:], strict=False):
                self.next_tries += 1
                if said != token:
                    break
                self.next_hits += 1

    def chance(self, rank: int, place: int) -> float:
        """Chance that the text follows a continuation up to and including its token `place`."""
        return self.hits[rank] / self.tries[rank] * (self.next_hits / self.next_tries) ** place


class JacobiWindow:
    """`width` columns of `depth` tokens: token r of column j is a candidate for place j + r + 1 behind the anchor.

    Row 0 is a chain behind the anchor; the rest of a column follows its token of row 0. So token r of column j sees the
    text, row 0 up to column j and its own column above it. New columns are pieces of the prompt, which is read again
    from its beginning when it ends.
    """

    def __init__(self, prompt: Sequence[int], width: int, depth: int) -> None:
        self.width, self.depth, self._prompt, self._place = width, depth, prompt, 0
        self.columns: list[tuple[int, ...]] = []
        self._fill()

    def num_columns(self, num_probe: int, probe_depth: int) -> int:
        """Whole columns that fit: at most `num_probe` tokens, none deeper than `probe_depth` behind the anchor."""
        return max(0, min(self.width, num_probe // self.depth, probe_depth - self.depth + 1))

    def nodes(self, num_columns: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the first columns, column after column; -1 is the anchor."""
        tokens = [token for column in self.columns[:num_columns] for token in column]
        firsts = [-1, *range(0, len(tokens), self.depth)]
        return tokens, [
            j * self.depth + r - 1 if r else firsts[j] for j in range(num_columns) for r in range(self.depth)
        ]

    def advance(self, answers: Sequence[int], num_emitted: int) -> list[tuple[int, tuple[int, ...]]]:
        """Move on by a round that emitted `num_emitted` tokens; n-grams found, as first token and the rest.

        `answers` are the target's tokens behind the last token of each column that was run. Such a column drops its
        first token and gains the answer, which moves it on by one place.
        """
        ran = [(*column, answer) for column, answer in zip(self.columns, answers, strict=False)]
        self.columns = [run[1:] for run in ran[num_emitted - 1 :]] if ran else self.columns[num_emitted:]
        self._fill()
        return [(run[0], run[1:]) for run in ran]

    def _fill(self) -> None:
        while len(self.columns) < self.width:
            self.columns.append(tuple(self._prompt[(self._place + r) % len(self._prompt)] for r in range(self.depth)))
            self._place += 1


@dataclass
class _LookaheadState:
    """One request; `recent` are the last tokens of its text."""

    pool: NgramPool
    window: JacobiWindow
    chances: ContinuationChances = field(default_factory=ContinuationChances)
    recent: tuple[int, ...] = ()

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text, and the n-grams that they complete to the pool."""
        span = self.window.depth + 1
        for token in tokens:
            self.recent = (*self.recent[-(span - 1) :], token)
            if len(self.recent) == span:
                self.pool.add(self.recent[0], self.recent[1:])

    def learn(self, anchor: int, emitted: Sequence[int]) -> None:
        """Count which continuations in the pool came true in a round."""
        for place, token in enumerate((anchor, *emitted[:-1])):
            self.chances.count(self.pool.after(token), emitted[place:])


class LookaheadDrafter(LookupDrafter):
    """Prefix trees from a pool of n-grams, and probes that fill it; nothing is shared between requests."""

    name = "lookahead"

    def __init__(self) -> None:
        self._requests: dict[int, _LookaheadState] = {}

    def variants(self, spec: SpecConfig) -> tuple[SpecConfig, ...]:
        """See `base.Variants`: with the window and without."""
        return product_of(spec, {"lookahead_window": (0, LOOKAHEAD_WINDOW)} if spec.lookahead_window == "auto" else {})

    def start(self, request: Request) -> None:
        """Fill the window and the pool from the prompt."""
        spec = request.spec
        window = JacobiWindow(request.prompt_ids, _columns(spec), spec.lookahead_ngram - 1)
        state = self._requests[request.request_id] = _LookaheadState(NgramPool(), window)
        state.extend(request.prompt_ids[-MAX_TOKENS:])

    def propose(self, batch: Batch) -> Draft:
        """What the pool says after the anchor; the window as probes."""
        draft = super().propose(batch)
        tokens: list[int] = []
        parents: list[int] = []
        lengths: list[int] = []
        for entry in batch.decoding:
            window = self._requests[entry.request.request_id].window
            most = min(_columns(entry.request.spec), window.num_columns(entry.num_probe, entry.probe_depth))
            own_tokens, own_parents = window.nodes(most)
            tokens += own_tokens
            parents += own_parents
            lengths.append(len(own_tokens))
        if not tokens:
            return draft
        return replace(
            draft, probes=Probes(torch.tensor(tokens, dtype=torch.int64), tuple(parents), (0, *accumulate(lengths)))
        )

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Take over the emitted text, and what the target said behind the window."""
        after = feedback.after_probes()
        answers = [] if after is None else to_host(after)[0]
        for b, entry in enumerate(batch.decoding):
            state, emitted = self._requests[entry.request.request_id], verdict.emitted(b)
            own = answers[draft.probes.offsets[b] : draft.probes.offsets[b + 1]] if draft.probes is not None else []
            depth = state.window.depth
            state.learn(entry.pending[-1], emitted)
            state.extend(emitted)
            for token, continuation in state.window.advance(own[depth - 1 :: depth], len(emitted)):
                state.pool.add(token, continuation)

    def finish(self, request_id: int) -> None:
        """Drop the request's window and pool."""
        del self._requests[request_id]

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The likeliest continuations of the last token; where only chains are taken, the latest one."""
        state = self._requests[entry.request.request_id]
        known = state.pool.after(ahead[-1] if ahead else entry.pending[-1])
        if not known or not entry.num_draft:
            return EMPTY
        return prefix_tree(known if entry.takes_trees else known[:1], state.chances, entry.num_draft)


def _columns(spec: SpecConfig) -> int:
    """The most columns of the window under a configuration."""
    return LOOKAHEAD_WINDOW if spec.lookahead_window == "auto" else spec.lookahead_window


def prefix_tree(continuations: Sequence[Sequence[int]], chances: ContinuationChances, budget: int) -> LookupTree:
    """The `budget` likeliest nodes of the continuations, latest first, common beginnings once."""
    paths = [
        [TreeNode(token, place - 1, chances.chance(rank, place)) for place, token in enumerate(continuation)]
        for rank, continuation in enumerate(continuations)
    ]
    return LookupTree.of(merge_trees(paths, budget))
