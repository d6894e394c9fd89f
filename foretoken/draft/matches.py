"""Where the last words of a text stood before, and what followed them: the index behind every lookup drafter.

Tokens that stand together lead to their latest place, and every place to the one before it. How far a place's past
agrees with the text's end, and what came after it, is read off the text itself. Adding a token costs two dictionary
entries at most, the cost of a query does not depend on the length of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

# Neighbouring tokens that lead to places: two are the least that is not noise; six find the place that agrees longest
# where the pair alone has stood too often.
_KEY_SIZES = (6, 2)
MAX_PLACES = 48  # latest places that are looked at
MATCH_LIMIT = 32  # how far back agreement is measured
NO_TOKEN = -1  # stands between texts of a store; never matches
_ENTRY_BYTES = 140  # a dictionary entry with its two numbers, roughly


@dataclass(frozen=True)
class Matches:
    """Places that agree with a text's end, latest first: `lengths` [m] of the agreement, `following` [m][d] tokens."""

    lengths: list[int]
    following: list[list[int]]

    def __len__(self) -> int:
        return len(self.lengths)


class MatchIndex:
    """A growing text and, for tokens that stand together, every place where something followed them."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._text = array("i")
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in _KEY_SIZES)  # by hash of the tokens
        self._previous = tuple(
            array("i") for _ in _KEY_SIZES
        )  # of each place the one before it with the same tokens, -1 if none
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. A place is indexed with the token that stands there, so the text's end never matches."""
        start = len(self._text)
        self._text.extend(array("i", tokens))
        stop = len(self._text)
        for size, latest, previous in zip(_KEY_SIZES, self._latest, self._previous, strict=True):
            known = self._text[max(0, start - size) : stop].tolist()
            base = stop - len(known)
            for place in range(start, stop):
                at = place - base
                window = tuple(known[at - size : at + 1]) if at >= size else ()
                if not window or NO_TOKEN in window:
                    previous.append(-1)
                    continue
                key = hash(window[:-1])
                previous.append(latest.get(key, -1))
                latest[key] = place

    @property
    def num_bytes(self) -> int:
        """Memory of the text and of the index, roughly."""
        return (
            4 * len(self._text)
            + sum(4 * len(places) for places in self._previous)
            + sum(_ENTRY_BYTES * len(found) for found in self._latest)
        )

    def end(self, count: int = MATCH_LIMIT) -> list[int]:
        """The last `count` tokens."""
        return self._text[max(0, len(self._text) - count) :].tolist()

    def matches(self, end: Sequence[int], depth: int, most: int = MAX_PLACES) -> Matches | None:
        """Places that agree with the last two tokens of `end` or more, and `depth` tokens after each, or None.

        The `most` latest that agree with six tokens, filled up with the latest that agree with two. Where the text ends
        a place copies itself on (a text that repeats).
        """
        places = self._places(end, most)
        if not places:
            return None
        past = array("i", end[-MATCH_LIMIT:])[::-1]
        agreeing = [(place, length) for place in places if (length := self._agreement(place, past)) >= _KEY_SIZES[-1]]
        if not agreeing:
            return None  # hashes may collide
        return Matches([length for _, length in agreeing], [self._following(place, depth) for place, _ in agreeing])

    def _agreement(self, place: int, past: array[int]) -> int:
        """How many tokens before `place` are those of `past`, both latest first."""
        own = self._text[max(0, place - len(past)) : place][::-1]
        if own == past:
            return len(past)
        for length, token in enumerate(own):
            if token != past[length]:
                return length
        return len(own)

    def _following(self, place: int, depth: int) -> list[int]:
        """The `depth` tokens from `place` on, in turn again where the text ends."""
        found = self._text[place : place + depth].tolist()
        while len(found) < depth:
            found += found[: depth - len(found)]
        return found

    def _places(self, end: Sequence[int], most: int) -> list[int]:
        """Latest first. What agrees with six tokens agrees with two: where two stood nowhere, nothing did."""
        found: set[int] = set()
        if len(end) < _KEY_SIZES[-1] or hash(tuple(end[-_KEY_SIZES[-1] :])) not in self._latest[-1]:
            return []
        for size, latest, previous in zip(_KEY_SIZES, self._latest, self._previous, strict=True):
            place = latest.get(hash(tuple(end[-size:])), -1) if len(end) >= size else -1
            while place >= 0 and len(found) < most:
                found.add(place)
                place = previous[place]
        return sorted(found, reverse=True)
