"""Lookahead decoding: the target guesses several places ahead in parallel, and what it says there is remembered as
n-grams.

Fu et al. 2024 (arXiv 2402.02057; `hao-ai-lab/LookaheadDecoding`). Behind the anchor stands a window of tokens that
nobody believes in; every round the target runs them as probes (`core.Probes`), and their answers are the window of the
next round: a Jacobi iteration. What one column says in successive rounds is an n-gram that the target itself has
written. It enters a pool; when its first token comes, the rest is guessed. The guesses are deterministic, so any rule
keeps them exact.

The window costs rows in every round. It has to earn them, or it rests (`Trial`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from foretoken.core import Batch, BatchEntry, Draft, Probes, Request, Verdict
from foretoken.draft.base import Feedback
from foretoken.draft.lookup_tree import LookupTree, assemble

MOST_CONTINUATIONS = 4  # of one token, in the pool
MOST_TOKENS = 1024  # with continuations, in the pool of one request
TRIAL_ROUNDS = 32  # of a window, before its gain is looked at
REST_ROUNDS = 128  # of a window that gained too little, before it is tried again
LEAST_GAIN = 1 / 32  # tokens that a probe's row must bring; a window of 8 then brings one in 4 rounds


class NgramPool:
    """What followed single tokens: for each the latest continuations, for the latest tokens only.

    Of a continuation it is kept whether the text itself held it, or the window alone.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[int, dict[tuple[int, ...], bool]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Tokens that have a continuation."""
        return len(self._found)

    def add(self, token: int, continuation: tuple[int, ...], in_text: bool) -> None:
        """Make `continuation` the latest one of `token`; the oldest of too many is forgotten."""
        own = self._found.setdefault(token, {})
        own[continuation] = own.pop(continuation, False) or in_text
        self._found.move_to_end(token)
        if len(own) > MOST_CONTINUATIONS:
            del own[next(iter(own))]
        if len(self._found) > MOST_TOKENS:
            self._found.popitem(last=False)

    def after(self, token: int) -> list[tuple[tuple[int, ...], bool]]:
        """Continuations of `token`, latest first, each with whether the text held it."""
        return list(reversed(self._found.get(token, {}).items()))


class JacobiWindow:
    """`width` columns of `depth` tokens: token r of column j is a guess for place j + r + 1 behind the anchor.

    Row 0 is a chain behind the anchor; the rest of a column hangs on its token of row 0. So token r of column j sees
    the text, row 0 up to column j and its own column above it. New columns are pieces of the prompt, read round and
    round.
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
class Trial:
    """Whether a window earns its rows, from counts of this request's own rounds alone.

    After `TRIAL_ROUNDS` rounds with probes the window must have brought `LEAST_GAIN` accepted tokens a row, tokens that
    the text itself would have told not counted; otherwise it rests for `REST_ROUNDS` rounds and is tried again.
    """

    num_rounds: int = 0
    num_rows: int = 0
    num_gained: int = 0
    num_rests: int = 0  # rounds of rest that are left

    @property
    def resting(self) -> bool:
        """Whether no probes are run now."""
        return self.num_rests > 0

    def count(self, num_rows: int, num_gained: int) -> None:
        """Add a round with so many probes, and so many accepted tokens that the window alone had told."""
        if self.resting:
            self.num_rests -= 1
            return
        if not num_rows:
            return
        self.num_rounds, self.num_rows, self.num_gained = (
            self.num_rounds + 1,
            self.num_rows + num_rows,
            self.num_gained + num_gained,
        )
        if self.num_rounds == TRIAL_ROUNDS:
            self.num_rests = REST_ROUNDS if self.num_gained < LEAST_GAIN * self.num_rows else 0
            self.num_rounds = self.num_rows = self.num_gained = 0


@dataclass
class _Lookahead:
    """One request: `recent` are the last tokens of its text, `guesses` the children of its latest draft (0 =
    anchor).
    """

    pool: NgramPool
    window: JacobiWindow
    recent: tuple[int, ...] = ()
    trial: Trial = field(default_factory=Trial)
    guesses: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text, and the n-grams that they complete to the pool."""
        span = self.window.depth + 1
        for token in tokens:
            self.recent = (*self.recent[-(span - 1) :], token)
            if len(self.recent) == span:
                self.pool.add(self.recent[0], self.recent[1:], in_text=True)


class LookaheadDrafter:
    """Prefix trees from a pool of n-grams, and probes that fill it; nothing is shared between requests."""

    name = "lookahead"

    def __init__(self) -> None:
        self._requests: dict[int, _Lookahead] = {}

    def start(self, request: Request) -> None:
        """Fill the window and the pool from the prompt."""
        spec = request.spec
        window = JacobiWindow(request.prompt_ids, spec.lookahead_window, spec.lookahead_ngram - 1)
        state = self._requests[request.request_id] = _Lookahead(NgramPool(), window)
        state.extend(request.prompt_ids[-MOST_TOKENS:])

    def propose(self, batch: Batch) -> Draft:
        """What the pool says after the anchor; the window as probes."""
        entries = batch.decoding
        draft = assemble(self.name, [self._guess(entry) for entry in entries])
        tokens: list[int] = []
        parents: list[int] = []
        lengths: list[int] = []
        for entry in entries:
            state = self._requests[entry.request.request_id]
            num_columns = 0 if state.trial.resting else state.window.num_columns(entry.num_probe, entry.probe_depth)
            own_tokens, own_parents = state.window.nodes(num_columns)
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
        answers = [] if after is None else after.tolist()
        for b, entry in enumerate(batch.decoding):
            state, emitted = self._requests[entry.request.request_id], verdict.emitted(b)
            own = answers[draft.probes.offsets[b] : draft.probes.offsets[b + 1]] if draft.probes is not None else []
            depth = state.window.depth
            state.trial.count(len(own), _num_gained(state.guesses, verdict.accepted[b]))
            state.guesses = {}
            state.extend(emitted)
            for token, continuation in state.window.advance(own[depth - 1 :: depth], len(emitted)):
                state.pool.add(token, continuation, in_text=False)

    def finish(self, request_id: int) -> None:
        """Forget the request's window and pool."""
        del self._requests[request_id]

    def resting(self, request_id: int) -> bool:
        """Whether the window of a request rests because it gained too little."""
        return self._requests[request_id].trial.resting

    def _guess(self, entry: BatchEntry) -> LookupTree:
        state = self._requests[entry.request.request_id]
        known = state.pool.after(entry.pending[-1])
        tree, state.guesses = prefix_tree(known if entry.takes_trees else known[:1], entry.num_draft)
        return tree


def prefix_tree(
    continuations: Sequence[tuple[tuple[int, ...], bool]], budget: int
) -> tuple[LookupTree, dict[tuple[int, int], tuple[int, bool]]]:
    """The first `budget` nodes of the continuations, common beginnings once; first come, first kept.

    The second result tells for (node, token), the anchor being node 0 and the tree's first node 1, the child and
    whether the text held it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], tuple[int, bool]] = {}
    for continuation, in_text in continuations:
        node = 0
        for token in continuation:
            child, known = children.get((node, token), (0, False))
            if not child:
                if len(tokens) == budget:
                    break
                tokens.append(token)
                parents.append(node - 1)
                child = len(tokens)
            children[node, token] = child, known or in_text
            node = child
    return LookupTree(tuple(tokens), tuple(parents)), children


def _num_gained(guesses: dict[tuple[int, int], tuple[int, bool]], accepted: Sequence[int]) -> int:
    """Accepted tokens that were guessed, and that the text itself had not told."""
    node = gained = 0
    for token in accepted:
        node, in_text = guesses.get((node, token), (-1, True))
        gained += not in_text
    return gained
