"""Prompt lookup: what followed the last words the previous times they stood in this very text.

After `apoorvumang/prompt-lookup-decoding` (longest match first), with an incremental index. Of the places that agree
longest the most frequent continuations are drafted, of equally frequent ones the latest, as far as the length of the
agreement makes them likely; where such places disagree the draft is a tree. Costs nothing when nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from foretoken.config import SpecConfig
from foretoken.core import Batch, BatchEntry, Draft, Request, Verdict
from foretoken.draft.base import Factory, Feedback
from foretoken.draft.lookup_tree import EMPTY, LookupTree, MatchIndex, assemble, grow_tree

BRANCHING = 2  # continuations of one place that are drafted, where the rule takes trees
MIN_ESTIMATE = 0.12  # a token less likely than this is not worth a row of the target


class NgramDrafter:
    """Deterministic drafts from the request's own text; the mass is a point at each draft token."""

    name = "ngram"
    keeps_answers = False  # see `base.FollowsText`

    def __init__(self) -> None:
        self._indexes: dict[int, MatchIndex] = {}

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:  # noqa: ARG003
        """See `base.Factory`."""
        return cls()

    def start(self, request: Request) -> None:
        """Index the prompt."""
        self._indexes[request.request_id] = MatchIndex(request.prompt_ids)

    def propose(self, batch: Batch) -> Draft:
        """Continue the longest match: few tokens for a short one, up to `num_draft` for a long one."""
        return assemble(self.name, [self.look_up(entry) for entry in batch.decoding])

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Append what was emitted."""
        for b, entry in enumerate(batch.decoding):
            self._indexes[entry.request.request_id].extend(verdict.emitted(b))

    def follow(self, request_id: int, tokens: Sequence[int]) -> None:
        """See `base.FollowsText`."""
        self._indexes[request_id].extend(tokens)

    def finish(self, request_id: int) -> None:
        """Drop the index."""
        del self._indexes[request_id]

    def reset(self) -> None:
        """See `base.Resets`: nothing outlives a request."""

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The likeliest continuations at the places that agree longest."""
        index = self._indexes[entry.request.request_id]
        matches = index.matches([*index.end(), *ahead], entry.num_draft) if entry.num_draft else None
        if matches is None:
            return EMPTY
        longest = max(matches.lengths)
        following = [
            tokens for length, tokens in zip(matches.lengths, matches.following, strict=True) if length == longest
        ]
        return grow_tree(following, entry.num_draft, BRANCHING if entry.takes_trees else 1, 1 / longest, MIN_ESTIMATE)
