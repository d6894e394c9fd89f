"""Prompt lookup: what followed the last words the previous time they stood in this very text.

After `apoorvumang/prompt-lookup-decoding` (METHOD: longest suffix first), with the most recent match, an incremental
index, and a draft that is as long as the match deserves. Costs nothing when nothing matches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foretoken.core import Batch, Draft, Request, Verdict
from foretoken.draft.base import Feedback

_LONGEST, _SHORTEST = 6, 2  # n-gram sizes looked up; one single token in common is noise
_MATCH_LIMIT = 32  # how far back a match is measured


class NgramIndex:
    """Where each n-gram of a growing text was last followed by something. O(1) per token and n-gram size."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._continuation: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram enters the index only with its continuation, so the text's own end never matches."""
        text = self.tokens
        for token in tokens:
            end = len(text)
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._continuation[tuple(text[end - size : end])] = end
            text.append(token)

    def match(self) -> tuple[int, int]:
        """Place right after the most recent match of the longest indexed suffix, and the match's length; (-1, 0) if none."""
        text = self.tokens
        for size in range(min(_LONGEST, len(text)), _SHORTEST - 1, -1):
            place = self._continuation.get(tuple(text[-size:]))
            if place is not None:
                length = size
                while length < min(_MATCH_LIMIT, place) and text[place - length - 1] == text[-length - 1]:
                    length += 1
                return place, length
        return -1, 0

    def continuation(self, place: int, num_tokens: int) -> list[int]:
        """`num_tokens` tokens from `place` on; past the end of the text the copy feeds itself (a repeating text)."""
        text = self.tokens
        period = len(text) - place
        return [text[place + i % period] if place + i >= len(text) else text[place + i] for i in range(num_tokens)]


class NgramDrafter:
    """Deterministic guesses from the request's own text; the mass is a point at each guess."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}

    def start(self, request: Request) -> None:
        """Index the prompt."""
        self._indexes[request.request_id] = NgramIndex(request.prompt_ids)

    def propose(self, batch: Batch) -> Draft:
        """Copy what followed the match: two tokens for a match of two, up to `num_draft` for a long one."""
        guesses = [self._guess(entry.request.request_id, entry.num_draft) for entry in batch.decoding]
        offsets = [0]
        for guess in guesses:
            offsets.append(offsets[-1] + len(guess))
        return Draft(
            tokens=torch.tensor([token for guess in guesses for token in guess], dtype=torch.int64),
            parents=tuple(i - 1 for guess in guesses for i in range(len(guess))),
            offsets=tuple(offsets),
            drafters=tuple(self.name if guess else None for guess in guesses),
        )

    def commit(self, batch: Batch, draft: Draft, verdict: Verdict, feedback: Feedback) -> None:  # noqa: ARG002
        """Append what was emitted."""
        for b, entry in enumerate(batch.decoding):
            self._indexes[entry.request.request_id].extend(verdict.emitted(b))

    def finish(self, request_id: int) -> None:
        """Drop the index."""
        del self._indexes[request_id]

    def _guess(self, request_id: int, num_draft: int) -> list[int]:
        index = self._indexes[request_id]
        if not num_draft:
            return []
        place, length = index.match()
        return index.continuation(place, min(num_draft, length)) if length else []
