"""What each part of a mix was worth so far: how many of its guesses stood, what they cost, how long it has not been
tried.

All of it comes from finished rounds, so that a choice made from it never looks at what the round draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.control.acceptance import PlaceRates
from foretoken.control.cost import CostTable

_KEEP = 0.93  # weight of the past per round
_PRIOR_GUESSES = 2.0  # what a promise is trusted with before it was kept or broken
RETRY_ROUNDS = 24  # a part that could guess and was passed over so often gets a turn


class PlaceAcceptance(PlaceRates):
    def shares(self, n):
        d, once = self.estimates(n)
        out = []
        for k, parent in enumerate(self.parents(n)):
            out.append(min(d[k], once[k] * (out[parent] if 0 <= parent < k else 1.0)))
        return d, out

    def observe(self, n, chances, parents=None):
        n = max(n, len(chances))
        super().observe(n, chances, list(range(-1, n - 1)))


class Promise:
    """How many of the guesses that a lookup's own estimates promised did stand; `prior` is the same over all
    requests.
    """

    def __init__(self, prior: Promise | None = None) -> None:
        self._prior, self._promised, self._kept = prior, 0.0, 0.0

    @property
    def factor(self) -> float:
        """By which its estimates are to be corrected."""
        before = 1.0 if self._prior is None else self._prior.factor
        return (self._kept + _PRIOR_GUESSES * before) / (self._promised + _PRIOR_GUESSES)

    def observe(self, promised: float, kept: float) -> None:
        """Take in a round in which `promised` guesses were expected to stand and `kept` did."""
        self._promised = _KEEP * self._promised + promised
        self._kept = _KEEP * self._kept + kept


@dataclass
class Record:
    """One part for one request: estimates, whether it was ever asked, and for how many rounds it was passed over."""

    survival: PlaceAcceptance
    promise: Promise
    was_asked: bool = False
    idle_rounds: int = 0

    @property
    def is_due(self) -> bool:
        """Whether it should be tried whatever it promises."""
        return self.idle_rounds >= RETRY_ROUNDS


@dataclass(frozen=True)
class Offer:
    """What a part would do for a request: `expected` accepted guesses from `num_rows` rows and `draft_s` seconds of
    drafting.
    """

    part: int
    expected: float
    num_rows: int
    draft_s: float = 0.0


class Prices:
    """Seconds of a step by rows, and of every part that asks a model by the tokens it drafts."""

    def __init__(self, num_parts: int) -> None:
        self.step, self.parts = CostTable(), tuple(CostTable(grows=True) for _ in range(num_parts))

    def tokens_per_s(self, offer: Offer, num_requests: int) -> float:
        """Expected tokens per second of a request that shares the step with `num_requests` in all, itself included;
        tokens while no step is known.
        """
        if self.step.is_empty:
            return 1.0 + offer.expected
        alone = self.step.seconds(num_requests)
        seconds = (
            alone / num_requests + max(0.0, self.step.seconds(num_requests + offer.num_rows) - alone) + offer.draft_s
        )
        return (1.0 + offer.expected) / max(seconds, 1e-9)

    def best(self, offers: Sequence[Offer], num_requests: int) -> Offer:
        """The offer with the most tokens per second; the first of equals."""
        return max(offers, key=lambda offer: self.tokens_per_s(offer, num_requests))
