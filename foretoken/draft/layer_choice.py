"""Which layers of the target draft, learned from finished rounds: exit layers that agree with the target, layers that
can be left out.

Nothing here sees a token of the round it decides for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.draft.layers import (
    best_exit,
    best_num_draft,
    changed_skips,
    exit_candidates,
    first_skips,
    relative_speed,
)
from foretoken.model.randomness import Purpose, uniforms

_MEMORY_ROWS = 64  # rows after which an observation counts for a third
_LEAST_ROWS = 8  # rows seen before an estimate decides anything
_PROBE_EVERY = 8  # rounds between two looks at the exits, once each was seen often enough
_TRIAL_EVERY = 8  # rounds between two trials of a set of skipped layers ...
_LATER_EVERY = 64  # ... and after the search
NUM_TRIALS = 48  # trials of the search


@dataclass
class Agreement:
    """How often a draft's token would have stood: a mean in which old rows fade."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, shares: Sequence[float]) -> None:
        """One number in [0, 1] per row."""
        keep = (1 - 1 / _MEMORY_ROWS) ** len(shares)
        self.weight = keep * self.weight + len(shares)
        self.total = keep * self.total + sum(shares)

    @property
    def is_known(self) -> bool:
        """Whether enough rows were seen."""
        return self.weight >= _LEAST_ROWS * (1 - 1 / _MEMORY_ROWS) ** _LEAST_ROWS

    @property
    def rate(self) -> float:
        """The mean."""
        return self.total / max(self.weight, 1.0)


class ExitChoice:
    """The exit layer and the number of guesses with the most expected tokens per cost.

    A look at a round takes the target's own residual stream after every candidate layer. Every round is looked at until
    each exit is known, then every eighth, whether anything is drafted or not: so exits that stopped paying are taken up
    again when they do.
    """

    def __init__(self, num_layers: int, head: float) -> None:
        self.num_layers, self.head = num_layers, head
        self.agreements = {layer: Agreement() for layer in exit_candidates(num_layers)}
        self._rounds = 0

    @property
    def candidates(self) -> tuple[int, ...]:
        """Layers that a draft may stop after."""
        return tuple(self.agreements)

    @property
    def _is_known(self) -> bool:
        return all(agreement.is_known for agreement in self.agreements.values())

    def choose(self, most: int) -> tuple[int, int]:
        """Exit layer and number of guesses, at most `most`; the middle candidate and all of them until the exits are
        known.
        """
        if not self._is_known:
            return self.candidates[len(self.candidates) // 2], most
        return best_exit(
            {layer: agreement.rate for layer, agreement in self.agreements.items()}, most, self.num_layers, self.head
        )

    def looks(self) -> bool:
        """Begin a round; whether it is to be looked at."""
        self._rounds += 1
        return not self._is_known or self._rounds % _PROBE_EVERY == 0

    def learn(self, layer: int, shares: Sequence[float]) -> None:
        """What a look at some rows showed of one candidate."""
        self.agreements[layer].add(shares)


@dataclass
class SkipSearch:
    """A set of layers to leave out, found by trying neighbours of the best so far on text that was generated already
    (SWIFT, 2410.06916).

    A trial runs the best set and a neighbour over the same recent rows and keeps the one with the greater expected
    speed. There is a trial every eighth round, or as soon after as there is text enough, `NUM_TRIALS` in all; after
    that the best set alone is measured, every 64th round.
    """

    num_layers: int
    head: float
    skipped: frozenset[int] = field(init=False)
    agreement: Agreement = field(default_factory=Agreement)
    num_trials: int = 0
    _rounds: int = 0  # since the last trial

    def __post_init__(self) -> None:
        self.skipped = first_skips(self.num_layers)

    def layers(self, skipped: frozenset[int] | None = None) -> tuple[int, ...]:
        """The layers that run."""
        return kept_layers(self.skipped if skipped is None else skipped, self.num_layers)

    def choose(self, most: int) -> tuple[tuple[int, ...], int]:
        """Layers to run and number of guesses, at most `most`; all of them until a trial was made."""
        if not self.agreement.is_known:
            return self.layers(), most
        return self.layers(), best_num_draft(
            self.agreement.rate, self._cost(self.skipped), self.num_layers + self.head, most
        )

    def tries(self) -> bool:
        """End a round; whether a trial is due."""
        self._rounds += 1
        return self._rounds >= (_TRIAL_EVERY if self.num_trials < NUM_TRIALS else _LATER_EVERY)

    def trial(self, agree: Callable[[tuple[int, ...]], Sequence[float]], most: int) -> None:
        """Learn from rows of finished text: `agree(layers)` tells for each whether a draft of these layers would have
        said what was said.
        """
        self._rounds = 0
        known = agree(self.layers())
        self.agreement.add(known)
        if self.num_trials >= NUM_TRIALS:
            return
        numbers = uniforms([0] * 3, Purpose.SEARCH, [self.num_trials] * 3, range(3))
        self.num_trials += 1
        other = changed_skips(self.skipped, self.num_layers, [float(number) for number in numbers])
        if other == self.skipped:
            return
        found = agree(self.layers(other))
        if self._speed(found, other, most) > self._speed(known, self.skipped, most):
            self.skipped, self.agreement = other, Agreement()
            self.agreement.add(found)

    def _cost(self, skipped: frozenset[int]) -> float:
        return self.num_layers - len(skipped) + self.head

    def _speed(self, shares: Sequence[float], skipped: frozenset[int], most: int) -> float:
        rate, whole = sum(shares) / len(shares), self.num_layers + self.head
        return max(relative_speed(rate, num, self._cost(skipped), whole) for num in range(1, max(most, 1) + 1))


def kept_layers(skipped: frozenset[int], num_layers: int) -> tuple[int, ...]:
    """The layers that are left, ascending."""
    return tuple(layer for layer in range(num_layers) if layer not in skipped)
