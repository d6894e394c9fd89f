"""How much better or worse guesses do now than was expected: a factor on the odds, sure while nothing changes and quick
after a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_DOUBT = 0.1  # variance of a request's log-odds about those of its kind
_DRIFTS = (0.0005, 0.3)  # variance that a round adds, where texts stay as they are and where they change
_SHARE = 0.003  # of the trust is dealt out anew every round, so that nobody's is ever lost
_MOST_STEP = 2.0  # of the log-odds in one round
_FARTHEST = 6.0  # log-odds
_LEAST = 1e-100  # likelihood of a round: many guesses that failed are no reason to divide by zero
_EDGE = 0.005  # chances are taken to lie so far from 0 and 1 at least


class AcceptanceShift:
    """Two followers of the same guesses, for a text that stays and for one that changes, trusted by how well each
    foretold the last rounds.

    A follower keeps the log-odds by which guesses differ from what was expected, and its variance: one step of Newton's
    method towards the posterior for every round (a Kalman filter whose observations are Bernoulli). The trust is that
    of Fixed Share (Herbster and Warmuth 1998): multiplied by the likelihood that a follower gave to what came, with a
    small share dealt out evenly.
    """

    def __init__(self) -> None:
        self._shifts = [0.0] * len(_DRIFTS)
        self._doubts = [_DOUBT] * len(_DRIFTS)
        self._trust = [1 / len(_DRIFTS)] * len(_DRIFTS)

    @property
    def factor(self) -> float:
        """On the odds of what was expected."""
        return math.exp(sum(trust * shift for trust, shift in zip(self._trust, self._shifts, strict=True)))

    def observe(self, expected: Sequence[float], found: Sequence[float]) -> None:
        """Take in the guesses of a round: the chance that each was given beforehand, and what became of it, 0 to 1."""
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
            self._trust[place] *= max(likelihood, _LEAST)
            self._doubts[place] = 1 / (1 / (self._doubts[place] + drift) + information)
            step = min(_MOST_STEP, max(-_MOST_STEP, self._doubts[place] * surprise))
            self._shifts[place] = min(_FARTHEST, max(-_FARTHEST, self._shifts[place] + step))
        total = sum(self._trust)
        self._trust = [(1 - _SHARE) * trust / total + _SHARE / len(_DRIFTS) for trust in self._trust]


def moved(chance: float, factor: float) -> float:
    """A chance whose odds are `factor` times as high."""
    return factor * chance / (1 - chance + factor * chance)


def _inside(chance: float) -> float:
    return min(1 - _EDGE, max(_EDGE, chance))
