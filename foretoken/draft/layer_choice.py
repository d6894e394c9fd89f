"""The search for layers of the target that a draft can leave out, on text that was generated already.

Nothing here sees a token of the round it decides for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.draft.layers import changed_skips, first_skips, relative_speed
from foretoken.text.randomness import Purpose, uniforms

_TRIAL_EVERY = 8  # rounds between two trials of a set of skipped layers
NUM_TRIALS = 48  # trials of the search


@dataclass
class SkipSearch:
    """A set of layers to leave out, found by trying neighbours of the best so far on text that was generated already
    (SWIFT, 2410.06916).

    A trial runs the best set and a neighbour over the same recent rows and keeps the one with the greater expected
    speed. There is a trial every eighth round, or as soon after as there is text enough, `NUM_TRIALS` in all.
    """

    num_layers: int
    head: float
    skipped: frozenset[int] = field(init=False)
    num_trials: int = 0
    _rounds: int = 0  # since the last trial

    def __post_init__(self) -> None:
        self.skipped = first_skips(self.num_layers)

    def layers(self, skipped: frozenset[int] | None = None) -> tuple[int, ...]:
        """The layers that run."""
        return kept_layers(self.skipped if skipped is None else skipped, self.num_layers)

    def tries(self) -> bool:
        """End a round; whether a trial is due."""
        self._rounds += 1
        return self.num_trials < NUM_TRIALS and self._rounds >= _TRIAL_EVERY

    def trial(self, agree: Callable[[tuple[int, ...]], Sequence[float]], most: int) -> None:
        """Learn from rows of finished text: `agree(layers)` tells for each whether a draft of these layers would have
        said what was said; `most` is the number of draft tokens in a round.
        """
        self._rounds = 0
        numbers = uniforms([0] * 3, Purpose.SEARCH, [self.num_trials] * 3, range(3))
        self.num_trials += 1
        other = changed_skips(self.skipped, self.num_layers, [float(number) for number in numbers])
        if other == self.skipped:
            return
        known, found = agree(self.layers()), agree(self.layers(other))
        if self._speed(found, other, most) > self._speed(known, self.skipped, most):
            self.skipped = other

    def _cost(self, skipped: frozenset[int]) -> float:
        return self.num_layers - len(skipped) + self.head

    def _speed(self, shares: Sequence[float], skipped: frozenset[int], most: int) -> float:
        rate, whole = sum(shares) / len(shares), self.num_layers + self.head
        return max(relative_speed(rate, num, self._cost(skipped), whole) for num in range(1, max(most, 1) + 1))


def kept_layers(skipped: frozenset[int], num_layers: int) -> tuple[int, ...]:
    """The layers that are left, ascending."""
    return tuple(layer for layer in range(num_layers) if layer not in skipped)
