"""How likely guesses are to be emitted, learnt from finished rounds: by drafter, slice of text, place and request.

What is estimated is the chance of each guess given that the one before it on its path was emitted: a guess behind a
rejected one was not judged. How that chance depends on the place in the draft (`PlaceRates`), or on the chance that a
lookup names (`ChanceRates`), belongs to the drafter and the slice and is learnt from all their requests. How much
better or worse one request does, and now, is one shift of the log-odds of all its guesses (`OddsShift`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from foretoken.control.previews import Preview

_KEEP = 0.98  # weight of the past per observation of a place: about the last fifty count
_KEEP_UNSEEN = 0.995  # per round, of places beyond the budget: one that failed by chance is tried again some day
_KEEP_CHANCES = 0.995  # weight of the past per guess of a class
_PRIOR_ROUNDS = 3.0  # observations that the prior of a place counts as
_PRIOR_GUESSES = 6.0  # guesses that the prior of a class counts as
_FIRST_CHANCE = 0.6  # of any guess, before anything is known
_MOST_PLACES = 128
_MOST_SLICES = 256
_EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.92, 0.96)  # between classes of the chance that a lookup names
_MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True))
_CLASSES = len(_MIDDLES)

_SHIFT_VARIANCE = 0.1  # of a request's log-odds about those of its slice
_DRIFTS = (0.0005, 0.3)  # variance that a round adds, for text that stays as it is and for text that changes
_SHARE = 0.003  # of the weight is dealt out evenly every round, so that neither filter loses all of its weight
_MOST_STEP = 2.0  # of the log-odds in one round
_FARTHEST = 6.0  # log-odds
_LEAST_LIKELIHOOD = 1e-100
_EDGE = 0.005  # chances are taken to lie at least so far from 0 and 1


class OddsShift:
    """Two Kalman filters on the log-odds of acceptance (slow, fast), mixed by Fixed Share.

    A filter keeps the log-odds by which guesses differ from what was expected, and its variance: for every round one
    step of Newton's method towards the posterior of Bernoulli observations. The weights are those of Fixed Share
    (Herbster and Warmuth 1998): multiplied by the likelihood that a filter gave to the round, with a small share dealt
    out evenly.
    """

    def __init__(self) -> None:
        self._shifts = [0.0] * len(_DRIFTS)
        self._variances = [_SHIFT_VARIANCE] * len(_DRIFTS)
        self._weights = [1 / len(_DRIFTS)] * len(_DRIFTS)

    @property
    def factor(self) -> float:
        """By which the odds of what was expected are multiplied."""
        return math.exp(sum(weight * shift for weight, shift in zip(self._weights, self._shifts, strict=True)))

    def observe(self, expected: Sequence[float], found: Sequence[float]) -> None:
        """Take in the judged guesses of a round: the chance expected of each, and what became of it, 0 to 1."""
        if not expected:
            return
        odds = [_inside(chance) / (1 - _inside(chance)) for chance in expected]
        for place, drift in enumerate(_DRIFTS):
            factor = math.exp(self._shifts[place])
            surprise, information, likelihood = 0.0, 0.0, 1.0
            for odd, outcome in zip(odds, found, strict=True):
                chance = _inside(factor * odd / (1 + factor * odd))
                surprise += outcome - chance
                information += chance * (1 - chance)
                likelihood *= outcome * chance + (1 - outcome) * (1 - chance)
            self._weights[place] *= max(likelihood, _LEAST_LIKELIHOOD)
            self._variances[place] = 1 / (1 / (self._variances[place] + drift) + information)
            step = min(_MOST_STEP, max(-_MOST_STEP, self._variances[place] * surprise))
            self._shifts[place] = min(_FARTHEST, max(-_FARTHEST, self._shifts[place] + step))
        total = sum(self._weights)
        self._weights = [(1 - _SHARE) * weight / total + _SHARE / len(_DRIFTS) for weight in self._weights]


@dataclass
class _Place:
    """Moving counts of one place: rounds it was offered in and guessed in, rounds it was judged in and emitted in."""

    parent: int
    offered: float = 0.0
    drafted: float = 0.0
    judged: float = 0.0
    emitted: float = 0.0

    def fade(self, keep: float) -> None:
        self.offered, self.drafted = keep * self.offered, keep * self.drafted
        self.judged, self.emitted = keep * self.judged, keep * self.emitted


@dataclass(eq=False)
class PlaceRates:
    """Acceptance by place, over many requests; `prior` is the same over more of them.

    Place k is the k-th node in the drafter's own order, best first: a smaller budget is a prefix of a larger one, for
    chains and for trees alike.
    """

    prior: PlaceRates | None = None
    _places: list[_Place] = field(default_factory=list)

    def observe(self, num_offered: int, chances: Sequence[float], parents: Sequence[int]) -> None:
        """Take in a round with a budget of `num_offered` guesses; those made were emitted with `chances`, in order.

        `parents` are the places that the guesses follow (-1: none).
        """
        while len(self._places) < num_offered:
            self._places.append(_Place(len(self._places) - 1))
        for k, place in enumerate(self._places):
            place.fade(_KEEP if k < num_offered else _KEEP_UNSEEN)
            if k < num_offered:
                place.offered += 1
                if k < len(chances):
                    place.drafted += 1
                    place.parent = parents[k]
        for k, chance in judged(num_offered, chances, self.parents(num_offered)):
            self._places[k].judged += 1
            self._places[k].emitted += chance

    def parents(self, num_places: int) -> list[int]:
        """The place that each of the first ones was last seen to follow."""
        known = [place.parent for place in self._places[:num_places]]
        rest = self.prior.parents(num_places) if self.prior is not None else range(-1, num_places - 1)
        return [*known, *rest[len(known) :]]

    def estimates(self, num_places: int) -> tuple[list[float], list[float]]:
        """By place the share of rounds with a guess, and the chance of the guess once the one before it stood."""
        if self.prior is not None:
            prior_drafted, prior_once = self.prior.estimates(num_places)
        drafted: list[float] = []
        once: list[float] = []
        for k in range(num_places):
            if self.prior is not None:
                d, p = min(prior_drafted[k], drafted[-1] if drafted else 1.0), prior_once[k]
            else:
                # Behind an accepted first guess the next ones are as likely as those between: a copied text goes on.
                d = drafted[-1] if drafted else 1.0
                p = sum(once[1:]) / (k - 1) if k > 1 else max([_FIRST_CHANCE, *once])
            if k < len(self._places):
                place = self._places[k]
                d = (place.drafted + _PRIOR_ROUNDS * d) / (place.offered + _PRIOR_ROUNDS)
                p = (place.emitted + _PRIOR_ROUNDS * p) / (place.judged + _PRIOR_ROUNDS)
            drafted.append(d)
            once.append(p)
        return drafted, once


@dataclass(eq=False)
class ChanceRates:
    """Share of a lookup's guesses that were right, by the chance it named; first guesses of a path and later ones
    apart.
    """

    prior: ChanceRates | None = None
    _right: list[float] = field(default_factory=lambda: [0.0] * (2 * _CLASSES))
    _judged: list[float] = field(default_factory=lambda: [0.0] * (2 * _CLASSES))

    def rates(self, preview: Preview) -> list[float]:
        """For each guess the share of guesses like it that were right once the guess before them was."""
        return [self._rate(place) for place in map(_class_of, preview.parents, preview.steps)]

    def observe(self, preview: Preview, found: Sequence[bool | None]) -> None:
        """Take in a round: for each guess whether it was right, None where it was not judged."""
        for parent, step, right in zip(preview.parents, preview.steps, found, strict=True):
            if right is not None:
                place = _class_of(parent, step)
                self._right[place] = _KEEP_CHANCES * self._right[place] + right
                self._judged[place] = _KEEP_CHANCES * self._judged[place] + 1

    def _rate(self, place: int) -> float:
        before = _MIDDLES[place % _CLASSES] if self.prior is None else self.prior._rate(place)
        return (self._right[place] + _PRIOR_GUESSES * before) / (self._judged[place] + _PRIOR_GUESSES)


@dataclass
class _Rates:
    """What is known of many requests together, by drafter."""

    places: dict[Hashable, PlaceRates] = field(default_factory=dict)
    chances: dict[Hashable, ChanceRates] = field(default_factory=dict)


@dataclass
class _RequestAcceptance:
    slice: str
    shifts: dict[Hashable, OddsShift] = field(default_factory=dict)


class Acceptance:
    """Estimated acceptance by drafter, place, slice and request.

    A request begins where earlier ones of its slice are; a slice where all texts are.
    """

    def __init__(self) -> None:
        self._every = _Rates()
        self._slices: OrderedDict[str, _Rates] = OrderedDict()  # used last at the end
        self._requests: dict[int, _RequestAcceptance] = {}

    def begin(self, request_id: int, slice_: str) -> None:
        """Keep estimates for a request; nothing happens if they are kept already."""
        if request_id not in self._requests:
            self._requests[request_id] = _RequestAcceptance(slice_)

    def of_places(self, request_id: int, drafter: Hashable, num_places: int) -> tuple[list[float], list[float]]:
        """For each of the first places: the share of rounds in which a guess is made, and in which it is emitted."""
        rates = self._places(request_id, drafter)
        drafted, once = rates.estimates(num_places)
        factor = self._factor(request_id, drafter)
        emitted: list[float] = []
        for k, parent in enumerate(rates.parents(num_places)):
            above = emitted[parent] if 0 <= parent < k else 1.0
            emitted.append(min(drafted[k], moved(once[k], factor) * above))
        return drafted, emitted

    def of_preview(self, request_id: int, drafter: Hashable, preview: Preview) -> list[float]:
        """The chance of each guess that is shown to be emitted."""
        factor = self._factor(request_id, drafter)
        emitted: list[float] = []
        for parent, rate in zip(preview.parents, self._chances(request_id, drafter).rates(preview), strict=True):
            emitted.append(moved(rate, factor) * (emitted[parent] if parent >= 0 else 1.0))
        return emitted

    def observe_round(
        self, request_id: int, drafter: Hashable, num_offered: int, chances: Sequence[float], parents: Sequence[int]
    ) -> None:
        """Take in a round without a preview: for each guess the chance with which it was emitted."""
        num_offered = min(max(num_offered, len(chances)), _MOST_PLACES)
        rates: PlaceRates | None = self._places(request_id, drafter)
        assert rates is not None
        own_parents = rates.parents(num_offered)
        own_parents[: len(parents)] = parents
        once = rates.estimates(num_offered)[1]
        found = list(judged(num_offered, chances, own_parents))
        self._shift(request_id, drafter).observe([once[k] for k, _ in found], [chance for _, chance in found])
        while rates is not None:
            rates.observe(num_offered, chances, own_parents)
            rates = rates.prior

    def observe_preview(
        self, request_id: int, drafter: Hashable, preview: Preview, found: Sequence[bool | None]
    ) -> None:
        """Take in what became of guesses that were shown, used or not: True right, None not judged."""
        rates: ChanceRates | None = self._chances(request_id, drafter)
        assert rates is not None
        once = rates.rates(preview)
        seen = [(chance, float(right)) for chance, right in zip(once, found, strict=True) if right is not None]
        self._shift(request_id, drafter).observe([chance for chance, _ in seen], [right for _, right in seen])
        while rates is not None:
            rates.observe(preview, found)
            rates = rates.prior

    def is_new(self, request_id: int, drafter: Hashable) -> bool:
        """Whether no round of this drafter was seen for the request."""
        return request_id not in self._requests or drafter not in self._requests[request_id].shifts

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def _factor(self, request_id: int, drafter: Hashable) -> float:
        shift = self._requests[request_id].shifts.get(drafter)
        return 1.0 if shift is None else shift.factor

    def _shift(self, request_id: int, drafter: Hashable) -> OddsShift:
        return self._requests[request_id].shifts.setdefault(drafter, OddsShift())

    def _places(self, request_id: int, drafter: Hashable) -> PlaceRates:
        every = self._every.places.setdefault(drafter, PlaceRates())
        own = self._of_slice(self._requests[request_id].slice)
        return every if own is self._every else own.places.setdefault(drafter, PlaceRates(every))

    def _chances(self, request_id: int, drafter: Hashable) -> ChanceRates:
        every = self._every.chances.setdefault(drafter, ChanceRates())
        own = self._of_slice(self._requests[request_id].slice)
        return every if own is self._every else own.chances.setdefault(drafter, ChanceRates(every))

    def _of_slice(self, slice_: str) -> _Rates:
        """What is known of texts of one slice; the empty name is all texts. The slice unused longest goes first."""
        if not slice_:
            return self._every
        if slice_ not in self._slices:
            self._slices[slice_] = _Rates()
            if len(self._slices) > _MOST_SLICES:
                self._slices.popitem(last=False)
        self._slices.move_to_end(slice_)
        return self._slices[slice_]


def judged(num_offered: int, chances: Sequence[float], parents: Sequence[int]) -> Iterator[tuple[int, float]]:
    """The places whose parent was emitted, each with the chance that it was emitted then; 0 where nothing was
    guessed.
    """
    for k in range(num_offered):
        parent = parents[k]
        if parent < 0 or (parent < len(chances) and chances[parent] > 0):
            yield k, (chances[k] / (chances[parent] if parent >= 0 else 1.0) if k < len(chances) else 0.0)


def moved(chance: float, factor: float) -> float:
    """A chance whose odds are `factor` times as high."""
    return factor * chance / (1 - chance + factor * chance)


def _class_of(parent: int, step: float) -> int:
    return bisect_right(_EDGES, step) + (_CLASSES if parent >= 0 else 0)


def _inside(chance: float) -> float:
    return min(1 - _EDGE, max(_EDGE, chance))
