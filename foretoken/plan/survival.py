"""How likely the guesses of a drafter are to be emitted, by their place in the draft, learnt from finished rounds.

Place k is the k-th node in the drafter's own order, best first: a smaller budget is then a prefix of a larger one, for chains and
for trees alike. What is kept is the chance of each place once the place before it on its path was emitted: a guess behind a rejected
one was not judged, and a place that was not offered was not tried, so neither says anything about that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_KEEP = 0.98  # weight of the past per observation: about the last fifty count
_KEEP_RECENT = 0.8  # of the short memory, about five rounds, that tells when the text has changed
_CHANGE = 0.45  # difference between the two that is no chance
_FORGET = 0.1  # what is left of the past of the first place then
_PRIOR_ROUNDS = 3.0  # what is expected beforehand is worth as much as so many observations
_FIRST_CHANCE = 0.6  # of any guess, before anything is known
_MOST_PLACES = 128


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
class Survival:
    """Estimates of one request (`forgets`), or of a drafter over requests of one kind; the latter are the `prior` of the former.

    A request forgets with every round, so that a place which failed long ago is tried again; a drafter's own figures fade only with
    new ones.
    """

    prior: Survival | None = None
    forgets: bool = False
    _places: list[_Place] = field(default_factory=list)
    _recent: float = -1.0  # of the first place, over the last few rounds

    def observe(self, num_offered: int, chances: Sequence[float], parents: Sequence[int] = ()) -> None:
        """Take in a round with a budget of `num_offered` guesses, in which those made were emitted with `chances`, in their order.

        `parents` are the places that the guesses follow (-1 none), a chain where it is left out.
        """
        num_offered = min(max(num_offered, len(chances)), _MOST_PLACES)
        if not num_offered:
            return
        if self.forgets:
            for place in self._places:
                place.fade(_KEEP)
        while len(self._places) < num_offered:
            self._places.append(_Place(len(self._places) - 1))
        for k in range(num_offered):
            place, drafted = self._places[k], k < len(chances)
            if drafted and parents:
                place.parent = parents[k]
            stood = place.parent < 0 or (place.parent < len(chances) and chances[place.parent] > 0)
            if not self.forgets:
                place.fade(_KEEP)
            place.offered += 1
            place.drafted += drafted
            if stood:
                place.judged += 1
                place.emitted += chances[k] / (chances[place.parent] if place.parent >= 0 else 1.0) if drafted else 0.0
        self._note_change(chances[0] if chances else 0.0)

    def shares(self, num_places: int) -> tuple[list[float], list[float]]:
        """For each of the first places: the share of rounds in which something is guessed there, and in which it is emitted."""
        drafted, once = self._estimates(num_places)
        emitted: list[float] = []
        for k in range(num_places):
            parent = self._parent(k)
            emitted.append(min(drafted[k], once[k] * (emitted[parent] if 0 <= parent < k else 1.0)))
        return drafted, emitted

    def _parent(self, k: int) -> int:
        if k < len(self._places):
            return self._places[k].parent
        return self.prior._parent(k) if self.prior is not None else k - 1

    def _estimates(self, num_places: int) -> tuple[list[float], list[float]]:
        """By place the share of rounds with a guess, and the chance of the guess once the one before it stood."""
        if self.prior is not None:
            prior_drafted, prior_once = self.prior._estimates(num_places)
        drafted: list[float] = []
        once: list[float] = []
        for k in range(num_places):
            d = drafted[-1] if drafted else 1.0
            # Behind a first guess that stood the next ones are as likely as those between: a lookup that found the place goes on.
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

    def _note_change(self, first: float) -> None:
        """Forget most of the first place's past when it has been doing far better or far worse of late."""
        place = self._places[0]
        self._recent = first if self._recent < 0 else _KEEP_RECENT * self._recent + (1 - _KEEP_RECENT) * first
        if abs(self._recent - place.emitted / place.judged) > _CHANGE:
            place.fade(_FORGET)
