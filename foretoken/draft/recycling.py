"""Token recycling: the target's own runner-up tokens of earlier steps are draft tokens for later ones.

Luo et al. 2024 (arXiv 2408.08696): a matrix keeps for every token the tokens that the target found likeliest after it
the last time; a draft is a tree of ranks over that matrix. The tree is not a fixed one: it holds the likeliest paths,
by how often each rank was right so far, as many nodes as the round may draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback
from foretoken.draft.lookup_tree import EMPTY, LookupDrafter, LookupTree
from foretoken.draft.tree import grow_best_first
from foretoken.transfer import to_host

NUM_RANKS = 8
_UNKNOWN = -1
# Of a hundred tries: what ranks are worth before anything is known.
_PRIOR_HITS = np.array([40, 10, 6, 4, 3, 2, 2, 1], dtype=np.float64)
_PRIOR_TRIES = 100
_MAX_TRIES = 2000  # then old texts count half


class RecyclingDrafter(LookupDrafter):
    """Deterministic trees from a matrix that all requests share; it keeps what last followed each single token."""

    name = "recycling"

    def __init__(self, vocab_size: int) -> None:
        self.successors = np.empty((vocab_size, NUM_RANKS), dtype=np.int32)  # [V, 8], likeliest first
        self.reset()

    @property
    def chances(self) -> tuple[float, ...]:
        """How often the token of each rank was the one emitted."""
        return tuple((self._hits / self._tries).tolist())

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:  # noqa: ARG003
        """See `base.Factory`."""
        return cls(factory.target.vocab_size)

    def start(self, request: Request) -> None:
        """Nothing to keep: a round starts from the last committed token."""

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:
        """Take over the target's likeliest tokens after every row, rows of draft tokens included.

        Where a token stands in several rows the deepest accepted one wins: it is the latest that the text really holds.
        """
        top = np.array(to_host(feedback.top_tokens(NUM_RANKS))[0], dtype=np.int32)  # [R, 8]
        tokens = draft.host_tokens
        for b, entry in enumerate(batch.decoding):
            rows = [entry.pending[-1], *tokens[draft.offsets[b] : draft.offsets[b + 1]]]
            kept = [0, *(1 + node for node in verdict.paths[b])]
            self._learn_ranks([rows[row] for row in kept], verdict.emitted(b))
            for row in (*(row for row in range(len(rows)) if row not in kept), *kept):
                self.successors[rows[row], : top.shape[1]] = top[draft.anchor_row(b) + row]

    def finish(self, request_id: int) -> None:
        """Nothing to forget; the matrix stays."""

    def reset(self) -> None:
        """See `base.Resets`: the matrix, and how often each rank was right."""
        self.successors.fill(_UNKNOWN)
        self._hits, self._tries = _PRIOR_HITS.copy(), _PRIOR_TRIES

    def _learn_ranks(self, before: Sequence[int], emitted: Sequence[int]) -> None:
        """Count at which rank each emitted token stood."""
        for token, successor in zip(before, emitted, strict=True):
            self._tries += 1
            self._hits += self.successors[token] == successor
        if self._tries > _MAX_TRIES:
            self._hits, self._tries = self._hits / 2, self._tries // 2

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The likeliest paths from the last token on."""
        if not entry.num_draft:
            return EMPTY
        anchor = ahead[-1] if ahead else entry.pending[-1]
        return grow_ranks(self.successors, anchor, self.chances, entry.num_draft, NUM_RANKS if entry.takes_trees else 1)


def grow_ranks(
    successors: NDArray[np.int32], anchor: int, chances: Sequence[float], budget: int, branching: int
) -> LookupTree:
    """The `budget` likeliest paths from `anchor` when the token of rank r is right with `chances[r]`, best first.

    Only the best rank counts where a node may have a single child.
    """
    order = sorted(range(len(chances)), key=lambda rank: -chances[rank])

    def after(token: int) -> list[tuple[float, int]]:
        row = successors[token].tolist()
        return [(chances[rank], row[rank]) for rank in order if row[rank] != _UNKNOWN][:branching]

    return LookupTree.of(grow_best_first(after(anchor), lambda node: after(node.token), budget))
