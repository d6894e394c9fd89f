"""How likely the guesses of a drafter are to be emitted, by their place in the draft, learnt from finished rounds.

Place k is the k-th node in the drafter's own order, best first: a smaller budget is then a prefix of a larger one, for
chains and for trees alike. What is kept is the chance of each place once the place before it on its path was emitted: a
guess behind a rejected one was not judged, and a place that was not offered was not tried, so neither says anything
about that place.

How the chance goes by place is a matter of the drafter and of the kind of text, and is learnt from all requests
together. How good the guesses are in one request, and now, is kept as a factor on the odds (`level`), so that a text
that changes moves all places at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foretoken.control.acceptance_shift import AcceptanceShift, moved

_KEEP = 0.98  # weight of the past per observation: about the last fifty count
_KEEP_UNSEEN = 0.995  # per round of what lies beyond the budget: a place that failed by chance is tried again some day
_PRIOR_ROUNDS = 3.0  # what is expected beforehand is worth as much as so many observations
_FIRST_CHANCE = 0.6  # of any guess, before anything is known
_MOST_PLACES = 128

Shares = tuple[list[float], list[float]]  # by place: rounds in which something is guessed there, and a chance


@dataclass
class _Place:
    """Moving counts of one place: rounds it was offered in and guessed in, rounds it was judged in and emitted in."""

    parent: int
    offered: float = 0.0
    drafted: float = 0.0
    judged: float = 0.0
    emitted: float = 0.0

    def fade(self, keep: float) -> None:
        """Let the past count less."""
        self.offered, self.drafted = keep * self.offered, keep * self.drafted
        self.judged, self.emitted = keep * self.judged, keep * self.emitted


@dataclass(eq=False)
class PlaceAcceptance:
    """Estimates of a drafter over many requests, or over those of one kind with all the others as their `prior`."""

    prior: PlaceAcceptance | None = None
    _places: list[_Place] = field(default_factory=list)

    def observe(self, num_offered: int, chances: Sequence[float], parents: Sequence[int] = ()) -> None:
        """Take in a round with a budget of `num_offered` guesses, in which those made were emitted with `chances`, in
        their order.

        `parents` are the places that the guesses follow (-1 none), a chain where it is left out.
        """
        num_offered = _num_places(num_offered, chances)
        while len(self._places) < num_offered:
            self._places.append(_Place(len(self._places) - 1))
        for k in range(num_offered):
            place, drafted = self._places[k], k < len(chances)
            if drafted and parents:
                place.parent = parents[k]
            place.fade(_KEEP)
            place.offered += 1
            place.drafted += drafted
        for place in self._places[num_offered:]:
            place.fade(_KEEP_UNSEEN)
        for k, chance in judged(num_offered, chances, parents or [place.parent for place in self._places]):
            self._places[k].judged += 1
            self._places[k].emitted += chance

    def shares(self, num_places: int) -> Shares:
        """For each of the first places: the share of rounds in which something is guessed there, and in which it is
        emitted.
        """
        drafted, once = self.estimates(num_places)
        return drafted, along_paths(drafted, once, self.parents(num_places))

    def parents(self, num_places: int) -> list[int]:
        """The place that each of the first ones was last seen to follow."""
        known = [place.parent for place in self._places[:num_places]]
        rest = self.prior.parents(num_places) if self.prior is not None else range(-1, num_places - 1)
        return [*known, *rest[len(known) :]]

    def estimates(self, num_places: int) -> Shares:
        """By place the share of rounds with a guess, and the chance of the guess once the one before it stood."""
        if self.prior is not None:
            prior_drafted, prior_once = self.prior.estimates(num_places)
        drafted: list[float] = []
        once: list[float] = []
        for k in range(num_places):
            d = drafted[-1] if drafted else 1.0
            # Behind a first guess that stood the next ones are as likely as those between: a lookup that found the
            # place goes on.
            p = sum(once[1:]) / (k - 1) if k > 1 else max([_FIRST_CHANCE, *once])
            if self.prior is not None:
                d, p = min(d, prior_drafted[k]), prior_once[k]
            if k < len(self._places):
                place = self._places[k]
                d = (place.drafted + _PRIOR_ROUNDS * d) / (place.offered + _PRIOR_ROUNDS)
                p = (place.emitted + _PRIOR_ROUNDS * p) / (place.judged + _PRIOR_ROUNDS)
            drafted.append(d)
            once.append(p)
        return drafted, once


@dataclass(eq=False)
class RequestAcceptance:
    """Estimates of one request: what is known of its kind, and how much better or worse its guesses do than those of
    others.
    """

    prior: PlaceAcceptance
    _level: AcceptanceShift = field(default_factory=AcceptanceShift)
    _offered: list[float] = field(default_factory=list)
    _drafted: list[float] = field(default_factory=list)

    def observe(self, num_offered: int, chances: Sequence[float], parents: Sequence[int] = ()) -> None:
        """Take in a round, see `PlaceAcceptance.observe`; to be told before the prior is."""
        num_offered = _num_places(num_offered, chances)
        self._offered += [0.0] * (num_offered - len(self._offered))
        self._drafted += [0.0] * (num_offered - len(self._drafted))
        self._offered = [_KEEP * count + (k < num_offered) for k, count in enumerate(self._offered)]
        self._drafted = [_KEEP * count + (k < len(chances)) for k, count in enumerate(self._drafted)]
        own_parents = self.prior.parents(num_offered)
        own_parents[: len(parents)] = parents
        once = self.prior.estimates(num_offered)[1]
        found = list(judged(num_offered, chances, own_parents))
        self._level.observe([once[k] for k, _ in found], [chance for _, chance in found])

    def shares(self, num_places: int) -> Shares:
        """For each of the first places: the share of rounds in which something is guessed there, and in which it is
        emitted.
        """
        drafted, once = self.prior.estimates(num_places)
        parents = self.prior.parents(num_places)
        factor = self._level.factor
        for k in range(num_places):
            once[k] = moved(once[k], factor)
            if k < len(self._offered):
                drafted[k] = (self._drafted[k] + _PRIOR_ROUNDS * drafted[k]) / (self._offered[k] + _PRIOR_ROUNDS)
        return drafted, along_paths(drafted, once, parents)


def judged(num_offered: int, chances: Sequence[float], parents: Sequence[int]) -> Iterator[tuple[int, float]]:
    """The places whose parent stood, each with the chance that it was emitted then; 0 where nothing was guessed
    there.
    """
    for k in range(num_offered):
        parent = parents[k] if k < len(parents) else k - 1
        if parent < 0 or (parent < len(chances) and chances[parent] > 0):
            yield k, (chances[k] / (chances[parent] if parent >= 0 else 1.0) if k < len(chances) else 0.0)


def along_paths(drafted: Sequence[float], once: Sequence[float], parents: Sequence[int]) -> list[float]:
    """The share of rounds in which each place is emitted, from its chance once its parent was."""
    emitted: list[float] = []
    for k, parent in enumerate(parents):
        emitted.append(min(drafted[k], once[k] * (emitted[parent] if 0 <= parent < k else 1.0)))
    return emitted


def _num_places(num_offered: int, chances: Sequence[float]) -> int:
    return min(max(num_offered, len(chances)), _MOST_PLACES)
