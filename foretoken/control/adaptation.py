"""When a drafter may learn, and when what it has learnt is used: the arithmetic of on-line adaptation.

`draft.base.AdaptableDrafter` says what learns, `adapt` does it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.params import check_number, check_whole

# Processor time that a learner which rested may use at once, in seconds: a few units of work. More would be felt by
# one request, less would make every unit wait for the clock.
_MAX_SAVED_S = 0.2
# Windows of held-out text that decide: with fewer, the standard error of their mean says little.
MIN_WINDOWS = 6
# A mean change of so many standard errors is taken for a real one. One of six candidates without effect passes, which
# the later comparison on newer text takes back; asking for two errors would refuse most small steps forward.
_ERRORS = 1.0


@dataclass(frozen=True)
class AdaptConfig:
    """How drafters with trained heads learn from what is served (docs/adaptation.md).

    - `share`: most of the machine's processor time that learning takes, of all cores together.
    - `buffer_tokens`: text kept in memory to learn from, the newest; a quarter of it is held out.
    - `swap_interval_s`: shortest time between two changes of the weights in use. Each change costs the drafter its
      cache: it reads the running requests' texts again.
    """

    share: float = 0.15
    buffer_tokens: int = 16_384
    swap_interval_s: float = 10.0

    def __post_init__(self) -> None:
        check_number("share", self.share, low=0.0, high=1.0, open_low=True)
        check_whole("buffer_tokens", self.buffer_tokens, low=1024)
        check_number("swap_interval_s", self.swap_interval_s, low=0.0, high=86_400.0)


class ShareBudget:
    """Keeps work in the background under a share of a machine of `num_cores`: a bucket that time fills and work
    empties. One thread works, so it never gets more than one core.

    Over any time t the work is at most rate * t, what was saved, and one unit of work.
    """

    def __init__(self, share: float, num_cores: int, now_s: float) -> None:
        self.rate = min(1.0, share * num_cores)  # processor seconds per second
        self._saved_s, self._last_s = 0.0, now_s

    def pause_s(self, now_s: float, spent_s: float) -> float:
        """How long to rest after a unit of work that took `spent_s` of processor time and ended at `now_s`."""
        self._saved_s = min(_MAX_SAVED_S, self._saved_s + (now_s - self._last_s) * self.rate) - spent_s
        self._last_s = now_s
        if self._saved_s >= 0:
            return 0.0
        return -self._saved_s / self.rate


@dataclass(frozen=True)
class Change:
    """The mean change of a score over windows that two versions of the weights were scored on, and its error."""

    mean: float
    error: float
    num_windows: int

    @property
    def rises(self) -> bool:
        """Whether the second version is better; never without enough windows, nor where a score is not a number."""
        return self.num_windows >= MIN_WINDOWS and self.mean > _ERRORS * self.error and self.mean > 0

    @property
    def falls(self) -> bool:
        """Whether the second version is worse, or has no score at all."""
        if not math.isfinite(self.mean):
            return self.num_windows > 0
        return self.num_windows >= MIN_WINDOWS and -self.mean > _ERRORS * self.error and self.mean < 0


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compare the scores of two versions, window by window."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences or not all(map(math.isfinite, differences)):
        return Change(math.nan, math.nan, len(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return Change(statistics.fmean(differences), error, len(differences))


def emitted_per_step(acceptances: Sequence[float]) -> float:
    """Tokens that a step emits where the draft token at place k is accepted with the k-th of these chances after its
    predecessors: 1 + a_1 + a_1 a_2 + ...
    """
    total, chance = 1.0, 1.0
    for acceptance in acceptances:
        chance *= acceptance
        total += chance
    return total
