"""Guesses that can be seen before a round, because nothing is drawn for them: how often they are right, whoever guesses
in the end.

A lookup says of every guess how likely it takes it to be. What it said is compared with what was emitted, also in
rounds in which its guesses were not used, so finding out whether a lookup pays costs no row of the target.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_EDGES = (
    0.15,
    0.3,
    0.45,
    0.6,
    0.75,
    0.85,
    0.92,
    0.96,
)  # of the chance that a lookup names, given that the guess before stood
_KEEP = 0.995  # weight of the past per guess of a class
_TRUST = 6.0  # guesses that a lookup's own word is worth
_KEEP_REQUEST = 0.9  # weight of a request's past per round
_PRIOR_GUESSES = 2.0  # that what is expected beforehand is worth
_HALF = 0.5  # keeps a few guesses from saying always or never
_KEEP_SIGHT = 0.8
_WORTH_LOOKING = 0.5  # share of what a look brings that it may take
_FREE_LOOK = 0.005  # share of a token's time that any look may take
_MOST_BLIND_ROUNDS = 15
_FIRST_LOOK = 8  # guesses that are looked at where few were made before
_KEEP_KIND = 0.99  # of a kind of requests


@dataclass(frozen=True)
class Preview:
    """Guesses that are ready, best first: the place each follows (-1 the text's end) and the chance its drafter gives
    the path to it.
    """

    parents: tuple[int, ...]
    chances: tuple[float, ...]

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """The chance of each guess once the one before it stood, by the drafter's own word."""
        return tuple(
            chance if parent < 0 else chance / self.chances[parent]
            for parent, chance in zip(self.parents, self.chances, strict=True)
        )


NO_PREVIEW = Preview((), ())


def reach(last_num_draft: int) -> int:
    """How many guesses to look at for a request that last made so many."""
    return _FIRST_LOOK + 2 * last_num_draft


class PreviewThrottle:
    """Whether to look at what a drafter has ready for a request: every round where that pays or costs next to nothing,
    else now and then.
    """

    def __init__(self) -> None:
        self._look_s = 0.0
        self._tokens = 1.0  # that one look brought, a moving average
        self._wait = 0

    def opens(self, token_s: float) -> bool:
        """Whether to look in this round, where a token takes `token_s` without guesses."""
        if self._wait:
            self._wait -= 1
            return False
        if self._look_s > _WORTH_LOOKING * max(self._tokens, _FREE_LOOK) * token_s:
            self._wait = min(_MOST_BLIND_ROUNDS, int(self._look_s / (_FREE_LOOK * token_s)) if token_s > 0 else 0)
        return True

    def took(self, look_s: float) -> None:
        """Take in what a look took."""
        self._look_s = (
            look_s if not self._look_s else min(look_s, _KEEP_SIGHT * self._look_s + (1 - _KEEP_SIGHT) * look_s)
        )

    def brought(self, tokens: int) -> None:
        """Take in how many tokens of the text a look showed; one that showed some is followed by another."""
        if tokens:
            self._wait = 0
        self._tokens = _KEEP_SIGHT * self._tokens + (1 - _KEEP_SIGHT) * tokens


def outcomes(look: Preview, tokens: Sequence[int], emitted: Sequence[int]) -> list[bool | None]:
    """For each guess, `tokens` in order, whether it was what was `emitted` there; None where the text took another way
    before it.
    """
    depths: list[int] = []  # place among the emitted tokens while the path is the text's own, else -1
    found: list[bool | None] = []
    for parent, token in zip(look.parents, tokens, strict=True):
        depth = 0 if parent < 0 else depths[parent]
        if not 0 <= depth < len(emitted):
            found.append(None)
            depths.append(-1)
            continue
        right = emitted[depth] == token
        found.append(right)
        depths.append(depth + 1 if right else -1)
    return found


class ChanceClasses:
    """How often a drafter's guesses were right by the chance it named, first guesses of a path and later ones apart."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._right = [_TRUST * middle for middle in middles] * 2
        self._judged = [_TRUST] * (2 * len(middles))

    def rates(self, look: Preview) -> list[float]:
        """For each guess the share of guesses like it that were right once the guess before them was."""
        return [self._right[place] / self._judged[place] for place in map(_class_of, look.parents, look.steps)]

    def observe(self, look: Preview, found: Sequence[bool | None]) -> None:
        """Take in a round."""
        for parent, step, right in zip(look.parents, look.steps, found, strict=True):
            if right is not None:
                place = _class_of(parent, step)
                self._right[place] = _KEEP * self._right[place] + right
                self._judged[place] = _KEEP * self._judged[place] + 1


class PreviewCalibration:
    """Corrects the chances that a drafter names for one request, or for requests of one kind (`slow`).

    The `classes` are all requests' together; what a request does better or worse than they say is kept as a factor on
    the odds, for first guesses and for later ones. `prior` says what to expect before anything was seen.
    """

    def __init__(self, classes: ChanceClasses, prior: PreviewCalibration | None = None, slow: bool = False) -> None:
        self.classes, self.prior, self._keep = classes, prior, _KEEP_KIND if slow else _KEEP_REQUEST
        self._counts = (
            [0.0] * 4,
            [0.0] * 4,
        )  # right, expected right, wrong, expected wrong: of first guesses, of later ones

    def chances(self, look: Preview) -> list[float]:
        """The chance that each guess is emitted."""
        first, later = self.factor(False), self.factor(True)
        found: list[float] = []
        for parent, rate in zip(look.parents, self.classes.rates(look), strict=True):
            odds = (first if parent < 0 else later) * rate
            found.append(odds / (1 - rate + odds) * (1.0 if parent < 0 else found[parent]))
        return found

    def observe(self, look: Preview, found: Sequence[bool | None]) -> None:
        """Take in a round: for each guess whether it was right, None where it was not judged."""
        if not any(right is not None for right in found):
            return
        for counts in self._counts:
            counts[:] = [self._keep * count for count in counts]
        for parent, rate, right in zip(look.parents, self.classes.rates(look), found, strict=True):
            if right is not None:
                counts = self._counts[parent >= 0]
                counts[0] += right
                counts[1] += rate
                counts[2] += not right
                counts[3] += 1 - rate

    def factor(self, later: bool) -> float:
        """On the odds of a guess, by whether it follows another one."""
        before = 1.0 if self.prior is None else self.prior.factor(later)
        right, expected_right, wrong, expected_wrong = self._counts[later]
        own = (right + _HALF) / (expected_right + _HALF) * (expected_wrong + _HALF) / (wrong + _HALF)
        trust = (right + wrong) / (right + wrong + _PRIOR_GUESSES)
        return float(own**trust * before ** (1 - trust))


def _class_of(parent: int, step: float) -> int:
    return bisect_right(_EDGES, step) + (len(_EDGES) + 1 if parent >= 0 else 0)
