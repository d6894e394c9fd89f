"""Suffix lookup: what followed the last words in this text, in earlier answers of the same tenant, in a corpus of
one's own, and in general where the target has an n-gram table.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975; `snowflakedb/ArcticInference`): for several lengths of
agreement the continuations of all places that agree that far form a tree of counts; the tree with the highest score,
the expected number of accepted tokens, is drafted. Places are looked up in an index instead of a suffix tree, the
latest few dozen of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Self

from foretoken.config import SpecConfig
from foretoken.core import BatchEntry, Request
from foretoken.draft.base import Factory
from foretoken.draft.lookup_tree import (
    EMPTY,
    MATCH_LIMIT,
    MAX_PLACES,
    NO_TOKEN,
    LookupTree,
    Matches,
    MatchIndex,
    TextLookup,
    continued,
    grow_tree,
)
from foretoken.draft.ngram import BRANCHING, MIN_ESTIMATE
from foretoken.draft.ngram_table import MAX_CONTEXT, NgramTable
from foretoken.draft.suffix_options import DEFAULT_STORE_TOKENS, MIN_STORE_TOKENS, SuffixOptions

_LENGTHS_TRIED = 3  # longest lengths of agreement that are compared
_NUM_SEGMENTS = 4  # a store forgets a quarter at a time


class SharedStore:
    """Finished answers of one tenant, the oldest forgotten first, in quarters; at most `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self._segment_tokens = max(2, max_tokens // _NUM_SEGMENTS)
        self._segments: deque[MatchIndex] = deque()

    def add(self, tokens: Sequence[int]) -> None:
        """Keep a text."""
        for start in range(0, len(tokens), self._segment_tokens - 1):
            piece = [*tokens[start : start + self._segment_tokens - 1], NO_TOKEN]
            if not self._segments or self._segments[-1].num_tokens + len(piece) > self._segment_tokens:
                self._segments.append(MatchIndex())
                if len(self._segments) > _NUM_SEGMENTS:
                    self._segments.popleft()
            self._segments[-1].extend(piece)

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return sum(segment.num_tokens for segment in self._segments)

    def matches(self, end: Sequence[int], depth: int) -> list[Matches]:
        """The latest places, the youngest segment first."""
        found: list[Matches] = []
        for segment in reversed(self._segments):
            missing = MAX_PLACES - sum(map(len, found))
            matches = segment.matches(end, depth, missing) if missing > 0 else None
            if matches is not None:
                found.append(matches)
        return found


class SuffixDrafter(TextLookup[MatchIndex]):
    """Deterministic trees from counts; the mass is a point at each draft token.

    A finished request's answer enters the store of its tenant (`SamplingParams.tenant`), never another's. `corpus` is a
    text of token ids that everybody's drafts may come from. Each store keeps `store_tokens`, all together `max_tokens`,
    where one that holds less counts as 256: the tenant unused longest is forgotten first.
    """

    name = "suffix"
    keeps_answers = True  # see `base.FollowsText`

    def __init__(
        self,
        corpus: Sequence[int] = (),
        store_tokens: int = DEFAULT_STORE_TOKENS,
        max_tokens: int = 4 * DEFAULT_STORE_TOKENS,
        table: NgramTable | None = None,
    ) -> None:
        super().__init__()
        self._requests: dict[int, Request] = {}
        self._stores: OrderedDict[str, SharedStore] = OrderedDict()  # by tenant, used last at the end
        self._store_tokens, self._max_tokens = min(store_tokens, max_tokens), max_tokens
        self._num_counted = 0  # tokens of all stores, as they count towards `max_tokens`
        self._corpus = MatchIndex([*corpus, NO_TOKEN] if corpus else ())
        self._table = table

    @classmethod
    def make(cls, factory: Factory, spec: SpecConfig) -> Self:
        """See `base.Factory`."""
        kept = SuffixOptions(**spec.options).store_tokens
        corpus = () if spec.corpus is None else factory.corpus(spec.corpus)
        return cls(corpus, kept, 4 * kept, factory.ngram_table(spec.ngram_table))

    def start(self, request: Request) -> None:
        """Index the prompt."""
        self._indexes[request.request_id] = MatchIndex(request.prompt_ids)
        self._requests[request.request_id] = request
        if request.params.tenant in self._stores:
            self._stores.move_to_end(request.params.tenant)

    def finish(self, request_id: int) -> None:
        """Move the answer, with the words before it, into the store of its tenant. An interrupted call can be repeated:
        it drops what is left.
        """
        index, request = self._indexes.pop(request_id, None), self._requests.pop(request_id, None)
        if index is None or request is None:
            return
        num_answer = index.num_tokens - len(request.prompt_ids)
        if not num_answer:
            return
        store = self._stores.setdefault(request.params.tenant, SharedStore(self._store_tokens))
        counted = self._counted(store)
        try:
            store.add(index.end(num_answer + min(MATCH_LIMIT, len(request.prompt_ids))))
        finally:
            self._num_counted += self._counted(store) - counted
        self._stores.move_to_end(request.params.tenant)
        while self._num_counted > self._max_tokens:
            self._num_counted -= self._counted(self._stores.popitem(last=False)[1])

    def reset(self) -> None:
        """See `base.Resets`: the answers of every tenant; the corpus stays."""
        self._stores.clear()
        self._num_counted = 0

    def _counted(self, store: SharedStore) -> int:
        return max(store.num_tokens, min(MIN_STORE_TOKENS, self._store_tokens)) if store.num_tokens else 0

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of finished requests held, over all tenants."""
        return sum(store.num_tokens for store in self._stores.values())

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The tree with the most expected accepted tokens, over all sources and lengths of agreement, continued with
        the target's n-gram table.
        """
        if not entry.num_draft:
            return EMPTY
        index, depth = self._indexes[entry.request.request_id], entry.num_draft
        end = [*index.end(), *ahead]
        own, fixed = index.matches(end, depth), self._corpus.matches(end, depth)
        store = self._stores.get(entry.request.params.tenant)
        others = [*(store.matches(end, depth) if store is not None else ()), *([fixed] if fixed is not None else ())]
        branching = BRANCHING if entry.takes_trees else 1
        trees = [
            tree
            for found in ([own] if own is not None else [], others)
            if found
            for tree in _trees(_together(found), depth, branching)
        ]
        # on a tie the request's own text, and the longer agreement
        best = max(trees, key=lambda tree: tree.score, default=EMPTY)
        if self._table is None:
            return best
        return continued(best, self._table.after, end[-MAX_CONTEXT:], depth, MIN_ESTIMATE)


def _trees(matches: Matches, budget: int, branching: int) -> list[LookupTree]:
    """One tree per length of agreement, longest first: a longer one knows more, a shorter one has seen more."""
    longest = sorted(set(matches.lengths), reverse=True)[:_LENGTHS_TRIED]
    return [grow_tree(matches.agreeing(least), budget, branching, 1 / least, MIN_ESTIMATE) for least in longest]


def _together(found: Sequence[Matches]) -> Matches:
    return Matches(
        [length for one in found for length in one.lengths], [tokens for one in found for tokens in one.following]
    )
