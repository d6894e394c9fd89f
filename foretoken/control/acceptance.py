"""How likely draft tokens are to be emitted, learnt from finished rounds: by drafter, slice of text, place and request.

What is estimated is the chance of each draft token given that the one before it on its path was emitted: a draft token
behind a rejected one was not judged. It depends on the place in the draft (`PlaceRates`), or on the chance that a
lookup names (`ChanceRates`). Both are counted for each request, each slice and all texts; the wider count is the prior
of the narrower one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from foretoken.control.candidates import Preview, RoundOutcome
from foretoken.control.config import DEFAULT, AcceptanceConfig


@dataclass
class _Place:
    """Moving counts of one place: rounds it was offered in and drafted in, rounds it was judged in and emitted in."""

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
    """Acceptance by place; `prior` is the same over more texts, `is_request`: these are of one request.

    Place k is the k-th node in the drafter's own order, best first: a smaller budget is a prefix of a larger one, for
    chains and for trees alike.
    """

    prior: PlaceRates | None = None
    config: AcceptanceConfig = DEFAULT.acceptance
    is_request: bool = False
    _places: list[_Place] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no round was seen."""
        return not self._places

    def observe(self, num_offered: int, chances: Sequence[float], parents: Sequence[int], path: Sequence[int]) -> None:
        """Take in a round with a budget of `num_offered` draft tokens, of which those at the places `path` were
        emitted.

        `chances` of those made, in order: to be emitted once their parents were; `parents` are the places that all of
        them follow (-1: none).
        """
        keep = self.config.request_memory if self.is_request else self.config.memory
        while len(self._places) < num_offered:
            self._places.append(_Place(len(self._places) - 1))
        for k, place in enumerate(self._places[:num_offered]):
            place.fade(keep)
            place.offered += 1
            if k < len(chances):
                place.drafted += 1
                place.parent = parents[k]
        reached = {-1, *path}
        for k, parent in enumerate(self.parents(num_offered)):
            if parent in reached:  # else nobody knows what would have become of it
                self._places[k].judged += 1
                self._places[k].emitted += chances[k] if k < len(chances) else 0.0

    def parents(self, num_places: int) -> list[int]:
        """The place that each of the first ones was last seen to follow."""
        known = [place.parent for place in self._places[:num_places]]
        rest = self.prior.parents(num_places) if self.prior is not None else range(-1, num_places - 1)
        return [*known, *rest[len(known) :]]

    def estimates(self, num_places: int) -> Iterator[tuple[float, float, int]]:
        """By place the share of rounds with a draft token, its chance once its parent stood, and the parent's place."""
        wider = None if self.prior is None else self.prior.estimates(num_places)
        prior_rounds, first_chance = self.config.prior_rounds, self.config.first_chance
        last, first, later = 1.0, 0.0, 0.0  # the share at the place before; the chance of the first, and of the rest
        for k in range(num_places):
            if wider is not None:
                share, chance, parent = next(wider)
                share = min(share, last)
            else:
                # Behind an accepted first draft token the next ones are as likely as those between: a copied text goes
                # on.
                share, chance, parent = last, later / (k - 1) if k > 1 else max(first_chance, first), k - 1
            if k < len(self._places):
                place = self._places[k]
                parent = place.parent
                share = (place.drafted + prior_rounds * share) / (place.offered + prior_rounds)
                chance = (place.emitted + prior_rounds * chance) / (place.judged + prior_rounds)
            last, first, later = share, first if k else chance, later + (chance if k else 0.0)
            yield share, chance, parent


@dataclass(eq=False)
class ChanceRates:
    """Share of a lookup's draft tokens that were right, by the chance it named; the first of a path apart."""

    prior: ChanceRates | None = None
    config: AcceptanceConfig = DEFAULT.acceptance
    is_request: bool = False

    def __post_init__(self) -> None:
        self._right, self._judged = ([0.0] * (2 * len(self.config.class_middles)) for _ in range(2))

    def rates(self, preview: Preview) -> list[float]:
        """For each draft token the share of those like it that were right once the draft token before them was."""
        return [self._rate(place) for place in map(self._class_of, preview.parents, preview.steps)]

    def observe(self, preview: Preview, found: Sequence[bool | None]) -> None:
        """Take in a round: for each draft token whether it was right, None where it was not judged."""
        keep = self.config.request_memory if self.is_request else self.config.chance_memory
        for parent, step, right in zip(preview.parents, preview.steps, found, strict=True):
            if right is not None:
                place = self._class_of(parent, step)
                self._right[place] = keep * self._right[place] + right
                self._judged[place] = keep * self._judged[place] + 1

    def _rate(self, place: int) -> float:
        middles, count = self.config.class_middles, self.config.prior_count
        before = middles[place % len(middles)] if self.prior is None else self.prior._rate(place)
        return (self._right[place] + count * before) / (self._judged[place] + count)

    def _class_of(self, parent: int, step: float) -> int:
        """First draft tokens of a path, then later ones, each by the chance that was named."""
        edges = self.config.class_edges
        return bisect_right(edges, step) + (len(edges) + 1 if parent >= 0 else 0)


_Known = tuple[tuple[int, int, float], tuple[tuple[float, ...], tuple[float, ...]]]


@dataclass(eq=False)
class _Rates:
    """What is known of one request, one slice or all texts, by drafter."""

    config: AcceptanceConfig
    prior: _Rates | None = None
    is_request: bool = False
    places: dict[Hashable, PlaceRates] = field(default_factory=dict)
    chances: dict[Hashable, ChanceRates] = field(default_factory=dict)
    known: dict[Hashable, _Known] = field(default_factory=dict)  # by drafter what `of_places` found last

    def places_of(self, drafter: Hashable) -> PlaceRates:
        """Begun when they are asked for the first time."""
        if drafter not in self.places:
            prior = None if self.prior is None else self.prior.places_of(drafter)
            self.places[drafter] = PlaceRates(prior, self.config, self.is_request)
        return self.places[drafter]

    def chances_of(self, drafter: Hashable) -> ChanceRates:
        """Begun when they are asked for the first time."""
        if drafter not in self.chances:
            prior = None if self.prior is None else self.prior.chances_of(drafter)
            self.chances[drafter] = ChanceRates(prior, self.config, self.is_request)
        return self.chances[drafter]


class Acceptance:
    """Estimated acceptance by drafter, place, slice and request.

    A request begins where earlier ones of its slice are; a slice where all texts are.
    """

    def __init__(self, config: AcceptanceConfig = DEFAULT.acceptance) -> None:
        self.config, self._every = config, _Rates(config)
        self._slices: OrderedDict[str, _Rates] = OrderedDict()  # used last at the end
        self._requests: dict[int, _Rates] = {}
        self._num_rounds: dict[Hashable, int] = {}  # observed, by drafter: what is kept of `of_places` is of as many

    def begin(self, request_id: int, slice_: str) -> None:
        """Keep estimates for a request; nothing happens if they are kept already."""
        if request_id not in self._requests:
            self._requests[request_id] = _Rates(self.config, self._of_slice(slice_), is_request=True)

    def of_places(
        self, request_id: int, drafter: Hashable, num_places: int, least: float = 0.0
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each of the first places: the share of rounds in which a draft token is made, and in which it is emitted.

        Places behind the first one that is emitted in a smaller share than `least` are left out.
        """
        drafted: list[float] = []
        emitted: list[float] = []
        own = self._requests[request_id]
        key, known = (self._num_rounds.get(drafter, 0), num_places, least), own.known.get(drafter)
        if known is not None and known[0] == key:
            return known[1]
        rates = own.places_of(drafter)
        while rates.is_empty and rates.prior is not None:
            rates = rates.prior
        for share, chance, parent in rates.estimates(num_places):
            above = emitted[parent] if 0 <= parent < len(emitted) else 1.0
            drafted.append(share)
            emitted.append(min(share, chance * above))
            if emitted[-1] < least:
                break
        found = tuple(drafted), tuple(emitted)
        own.known[drafter] = (key, found)
        return found

    def of_preview(self, request_id: int, drafter: Hashable, preview: Preview) -> list[float]:
        """The chance of each draft token that is shown to be emitted."""
        emitted: list[float] = []
        rates = self._requests[request_id].chances_of(drafter).rates(preview)
        for parent, rate in zip(preview.parents, rates, strict=True):
            emitted.append(rate * (emitted[parent] if parent >= 0 else 1.0))
        return emitted

    def observe_round(self, drafter: Hashable, round_: RoundOutcome) -> None:
        """Take in a round without a preview; where the drafter had no room it tells of its request alone."""
        assert round_.chances is not None
        self._num_rounds[drafter] = self._num_rounds.get(drafter, 0) + 1
        num_offered = min(max(round_.budget.num_draft, len(round_.chances)), self.config.max_places)
        rates: PlaceRates | None = self._requests[round_.request_id].places_of(drafter)
        assert rates is not None
        parents = rates.parents(num_offered)
        parents[: len(round_.parents)] = round_.parents
        while rates is not None:
            rates.observe(num_offered, round_.chances, parents, round_.path)
            rates = rates.prior if round_.has_run else None

    def observe_preview(
        self, request_id: int, drafter: Hashable, preview: Preview, found: Sequence[bool | None]
    ) -> None:
        """Take in what became of draft tokens that were shown, used or not: True right, None not judged."""
        rates: ChanceRates | None = self._requests[request_id].chances_of(drafter)
        while rates is not None:
            rates.observe(preview, found)
            rates = rates.prior

    def is_new(self, request_id: int, drafter: Hashable) -> bool:
        """Whether no round of this drafter was seen for the request."""
        return request_id not in self._requests or self._requests[request_id].places_of(drafter).is_empty

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._requests.pop(request_id, None)

    def _of_slice(self, slice_: str) -> _Rates:
        """What is known of texts of one slice; the empty name is all texts. The slice unused longest goes first."""
        if not slice_:
            return self._every
        if slice_ not in self._slices:
            self._slices[slice_] = _Rates(self.config, self._every)
            if len(self._slices) > self.config.max_slices:
                self._slices.popitem(last=False)
        self._slices.move_to_end(slice_)
        return self._slices[slice_]
