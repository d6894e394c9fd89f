"""What a drafter drafted in real rounds and what of it stood, kept so that a simulation can draw on it.

Lookups draft where the text repeats itself and nothing elsewhere, and a place that was found goes on: their draft
tokens do not stand independently of each other, nor do all answers gain alike. So no rates are kept but whole answers,
place by place.

Studies make records of answers of the engine (`studies.validation.records`).
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.control.candidates import Preview


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
