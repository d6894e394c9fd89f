"""Predicted text: the caller expects an answer much like a given one, and the draft follows it.

OpenAI's `prediction`. A cursor walks along the prediction while the answer agrees. Where it does not, the cursor waits,
and takes up again where the prediction agrees with the last words of the answer: behind the place where it was lost
first, since an answer that changed a line goes on after it. Right after that it drafts few tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy

from foretoken.core import BatchEntry, Request
from foretoken.draft.lookup_tree import EMPTY, LookupTree, TextLookup

_ANCHOR_TOKENS = (4, 3, 2)  # lengths of agreement that take the cursor up again, best first
_SURE_TOKENS = 6  # longer than a chance match: from here on the prediction is drafted in full
_LOST = -1


class Cursor:
    """Where the answer stands in the prediction."""

    def __init__(self, prediction: tuple[int, ...]) -> None:
        self._prediction = prediction
        self._stops: dict[tuple[int, ...], list[int]] = {}  # tokens -> places right behind them, in order
        for size in _ANCHOR_TOKENS:
            for stop in range(size, len(prediction) + 1):
                self._stops.setdefault(prediction[stop - size : stop], []).append(stop)
        self._recent: tuple[int, ...] = ()  # the last tokens of the answer
        self._at = 0  # the place expected next
        self._agreed = _SURE_TOKENS  # tokens before it that agreed; the start is what the caller claims
        self._left_at = 0  # where the answer surely was when it left the prediction

    @property
    def place(self) -> int | None:
        """The place expected next; None while the answer has left the prediction, and behind its end."""
        return self._at if 0 <= self._at < len(self._prediction) else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow the answer by `tokens`."""
        for token in tokens:
            self._recent = (*self._recent[1 - _ANCHOR_TOKENS[0] :], token)
            if self._at != _LOST and self._prediction[self._at : self._at + 1] == (token,):
                self._at += 1
                self._agreed += 1
            else:
                self._leave()

    def ahead(self, most: int) -> tuple[int, ...]:
        """What the prediction says next; after it was lost no more than twice what agreed since."""
        if self._at == _LOST:
            return ()
        return self._prediction[
            self._at : self._at + (most if self._agreed >= _SURE_TOKENS else min(most, 2 * self._agreed))
        ]

    def _leave(self) -> None:
        """The answer left the prediction: take up again behind the last sure place, or else nearest before it."""
        if self._at != _LOST and self._agreed >= _SURE_TOKENS:
            self._left_at = self._at
        self._at, self._agreed = _LOST, 0
        for size in _ANCHOR_TOKENS:
            stops = self._stops.get(self._recent[-size:])
            if stops:
                self._at = stops[min(bisect_left(stops, self._left_at), len(stops) - 1)]
                self._agreed = size
                return


def num_followed(prediction: Sequence[int], tokens: Sequence[int]) -> int:
    """At how many places of a prediction the answer `tokens` agreed with it, each place counted once."""
    cursor, places = Cursor(tuple(prediction)), set()
    for token in tokens:
        place = cursor.place
        cursor.extend((token,))
        if place is not None and prediction[place] == token:
            places.add(place)
    return len(places)


class PredictedDrafter(TextLookup[Cursor]):
    """Deterministic drafts from `SamplingParams.prediction`; the mass is a point at each draft token."""

    name = "predicted"

    def start(self, request: Request) -> None:
        """Index the prediction."""
        self._indexes[request.request_id] = Cursor(request.prediction_ids)

    def look_up(self, entry: BatchEntry, ahead: Sequence[int] = ()) -> LookupTree:
        """The next tokens of the prediction, taken as sure; nothing while the answer has left it."""
        cursor = self._indexes[entry.request.request_id]
        if ahead:
            cursor = copy(cursor)  # what it has looked up is shared, where it stands is not
            cursor.extend(ahead)
        said = cursor.ahead(entry.num_draft) if entry.num_draft else ()
        return LookupTree(said, tuple(range(-1, len(said) - 1)), (1.0,) * len(said)) if said else EMPTY
