"""Prompt lookup: what followed the last words the previous times they stood in this very text.

After `apoorvumang/prompt-lookup-decoding` (longest match first), with an incremental index. Of the places that agree
longest the most frequent continuations are drafted, of equally frequent ones the latest, as far as the length of the
agreement makes them likely; where such places disagree the draft is a tree. Costs nothing when nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.core import BatchEntry, Request
from foretoken.draft.lookup_tree import EMPTY, LookupTree, MatchIndex, TextLookup, grow_tree

BRANCHING = 2  # continuations of one place that are drafted, where the rule takes trees
MIN_ESTIMATE = 0.12  # a token less likely than this is not worth a row of the target


class NgramDrafter(TextLookup[MatchIndex]):
    """Deterministic drafts from the request's own text; the mass is a point at each draft token."""

    name = "ngram"

    def start(self, request: Request) -> None:
        """Index the prompt."""
        self._indexes[request.request_id] = MatchIndex(request.prompt_ids)

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The likeliest continuations at the places that agree longest: few tokens for a short agreement, up to
        `num_draft` for a long one.
        """
        index = self._indexes[entry.request.request_id]
        matches = index.matches([*index.end(), *ahead], entry.num_draft) if entry.num_draft else None
        if matches is None:
            return EMPTY
        longest = max(matches.lengths)
        branching = BRANCHING if entry.takes_trees else 1
        return grow_tree(matches.agreeing(longest), entry.num_draft, branching, 1 / longest, MIN_ESTIMATE)
