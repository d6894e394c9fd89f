"""What a drafter drafted in real rounds and what of it stood, kept so that a simulation can draw on it.

Lookups draft where the text repeats itself and nothing elsewhere, and a place that was found goes on: their draft
tokens do not stand independently of each other, nor do all answers gain alike. So no rates are kept but whole answers,
place by place.

Of a drafter that needs nothing but the text the draft tokens at every place are known exactly, once the answer is
(`told`). Of others only the rounds that ran are known, and what lies between them follows from these (`record_of`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.control.candidates import Preview

_MAX_NODES = 24  # draft tokens of a round that are kept; what the policy asks for at most


@dataclass(frozen=True)
class Round:
    """Draft tokens as a tree: `parents` of nodes in the drafter's order (-1 none), the `path` that stood."""

    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    def within(self, num_draft: int) -> Round:
        """The round under a smaller budget, which is given the first nodes of the larger one."""
        if num_draft >= len(self.parents):
            return self
        return Round(self.parents[:num_draft], tuple(node for node in self.path if node < num_draft))

    def behind(self) -> Round:
        """What is left once the first node that stood is part of the text."""
        below: dict[int, int] = {self.path[0]: -1}
        for node, parent in enumerate(self.parents):
            if parent in below and node not in below:
                below[node] = len(below) - 1
        parents = tuple(below[self.parents[node]] for node in list(below)[1:])
        return Round(parents, tuple(below[node] for node in self.path[1:]))

    def under(self, first: bool, after: Round) -> Round:
        """This round, every node of which stood or which has none, with a draft token more at its end: it stands
        (`first`) with `after` below.
        """
        node = len(self.parents)
        end = self.path[-1] if self.path else -1
        if not first:
            return Round((*self.parents, end), self.path)
        shifted = tuple(node if parent < 0 else node + 1 + parent for parent in after.parents)
        return Round((*self.parents, end, *shifted), (*self.path, node, *(node + 1 + below for below in after.path)))


def chain(num_draft: int, num_kept: int) -> Round:
    """`num_draft` draft tokens one after the other, of which the first ones stood."""
    return Round(tuple(range(-1, num_draft - 1)), tuple(range(num_kept)))


@dataclass(frozen=True)
class Record:
    """One answer: the round that begins at each of its places, the second token's first (the first is never drafted).

    Of a drafter that shows its draft tokens also the answer's `tokens`, the `previews` at each place, and the seconds
    that one takes.
    """

    rounds: tuple[Round, ...]
    tokens: tuple[int, ...] = ()
    previews: tuple[Preview, ...] = ()
    preview_s: float = 0.0

    def at(self, place: int, num_draft: int) -> Round:
        """The round at `place` with a budget of `num_draft`; beyond its end the answer begins anew."""
        return self.rounds[place % len(self.rounds)].within(num_draft)

    def preview_at(self, place: int, most: int) -> Preview:
        """What was shown at `place`, `most` draft tokens at most."""
        return self.previews[place % len(self.previews)].first(most)

    def emitted(self, place: int, count: int) -> tuple[int, ...]:
        """The `count` tokens that a round at `place` emits, fewer at the answer's end."""
        first = place % len(self.previews) + 1
        return self.tokens[first : first + count]


@dataclass(frozen=True)
class Records:
    """Answers to prompts of one kind, at least one: a request goes the way of one of them."""

    answers: tuple[Record, ...]


def told(tokens: Sequence[int], previews: Sequence[Preview], preview_s: float) -> Record:
    """The record of an answer of which is known what was shown at each of its places, all but the first."""
    assert len(previews) == len(tokens) - 1
    rounds = []
    for place, shown in enumerate(previews):
        right = shown.outcomes(tokens[place + 1 :])
        rounds.append(Round(shown.parents, tuple(node for node, stands in enumerate(right) if stands)))
    return Record(tuple(rounds), tuple(tokens), tuple(previews), preview_s)


def record_of(seen: Mapping[int, tuple[int, Round]], seed: int = 0) -> Record | None:
    """The record of an answer whose rounds were seen: by place, the budget and the round. None where nothing was
    drafted with a budget.

    A round that begins within what another one drafted rightly is the rest of that one. Where draft tokens ended
    because the budget did, they are taken to go on: behind a draft token that failed with draft tokens that fail,
    behind one that stood with one that was never judged, drawn with the share of draft tokens that stood, and then with
    the round that really came there.
    """
    whole = {place: pair for place, pair in sorted(seen.items()) if pair[0] > 0}
    if not whole:
        return None
    judged = sum(len(r.path) + (len(r.path) < len(r.parents)) for _, r in whole.values())
    share = sum(len(r.path) for _, r in whole.values()) / judged if judged else 0.0
    rng = random.Random(seed)
    rounds: dict[int, Round] = {}
    for place, (budget, found) in sorted(whole.items(), reverse=True):
        rest = (
            _continued(found, rounds.get(place + len(found.path) + 1, Round()), rng.random() < share)
            if len(found.parents) >= budget
            else found
        )
        for inner in range(len(found.path) + 1):
            rounds[place + inner] = rest.within(_MAX_NODES)
            if rest.path:
                rest = rest.behind()
    return Record(tuple(rounds[place] for place in sorted(rounds)))


def _continued(found: Round, after: Round, stands: bool) -> Round:
    """A round that its budget cut short, as far as a larger budget might have taken it."""
    ends = bool(found.path) and found.path[-1] not in found.parents
    longer = found.under(stands, after) if ends else found
    while len(longer.parents) < _MAX_NODES:
        longer = Round((*longer.parents, len(longer.parents) - 1), longer.path)
    return longer
