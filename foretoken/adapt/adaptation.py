"""How one drafter adapts: learn, judge on held-out text, offer new weights, take them back if they were a mistake.

The learner's thread runs `work`, a generator that rests at every `yield`. What is to be used next waits in `offer`
until the engine's thread takes it between two steps (`taken`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from foretoken.adapt.buffer import ExampleBuffer, Window
from foretoken.adapt.learner import Learner, Weights
from foretoken.control.adaptation import MIN_WINDOWS, AdaptConfig, change

_PASSES = 8  # over the same text: more would learn it by heart
_WINDOWS_PER_ROUND = 48  # learnt between two judgements, which read every held-out window
_MAX_JUDGED = 24  # windows, the newest: a judgement should not take longer than what it judges


class Rest(Enum):
    """What the learner's thread does after a unit of work."""

    SHORT = "after work, as the share of the machine demands"
    LONG = "nothing to do until more is served"


@dataclass(frozen=True)
class Offer:
    """Weights that the engine shall draft with from the next step on."""

    version: int
    weights: Weights


@dataclass(frozen=True)
class AdaptationState:
    """What came of adapting one drafter so far.

    `version` counts the changes of the weights in use, returns to earlier ones included. `before` and `after` are the
    tokens per step along held-out text at the last judgement, under the weights in use and under those learnt.
    """

    drafter: str
    version: int = 0
    num_swaps: int = 0
    num_returns: int = 0
    num_judged: int = 0
    num_learnt_tokens: int = 0
    num_kept_tokens: int = 0
    before: float | None = None
    after: float | None = None


class Adaptation:
    """One drafter's learning; `weights` are those in use at the beginning."""

    def __init__(
        self,
        name: str,
        buffer: ExampleBuffer,
        learner: Learner,
        config: AdaptConfig,
        clock_s: Callable[[], float],
    ) -> None:
        self.buffer, self._learner, self._config, self._clock_s = buffer, learner, config, clock_s
        self.offer: Offer | None = None
        self._state = AdaptationState(name)
        self._in_use: Weights = learner.weights()
        self._earlier: Weights | None = None  # in use before these; None once these have proven themselves
        self._changed_s = -math.inf
        self._first_window = 0  # number of the first window that was served after the last change
        self._known: dict[int, float] = {}  # scores of the weights in use, by window
        self._is_judged = True  # nothing was learnt since the last judgement

    @property
    def state(self) -> AdaptationState:
        """What came of it so far."""
        return replace(self._state, num_kept_tokens=self.buffer.num_tokens)

    def taken(self, offer: Offer) -> None:
        """The engine drafts with the offered weights from now on."""
        assert offer is self.offer
        self._state = replace(self._state, version=offer.version)
        self._changed_s, self._first_window = self._clock_s(), self.buffer.num_windows
        self.offer = None

    def work(self) -> Iterator[Rest]:
        """Units of work without an end."""
        while True:
            if self.offer is not None or len(self.buffer.held_out()) < MIN_WINDOWS:
                yield Rest.LONG
                continue
            yield from self._prove()
            if self.offer is not None:
                continue
            yield from self._learn()
            if self._is_judged or self._clock_s() - self._changed_s < self._config.swap_interval_s:
                yield Rest.LONG if self._may_not_learn else Rest.SHORT
            else:
                yield from self._judge()

    @property
    def _may_not_learn(self) -> bool:
        return self._state.num_learnt_tokens >= _PASSES * self.buffer.num_added

    def _learn(self) -> Iterator[Rest]:
        for _ in range(_WINDOWS_PER_ROUND):
            window = None if self._may_not_learn else self.buffer.sample()
            if window is None:
                return
            self._learner.learn(window)
            self._is_judged = False
            self._state = replace(self._state, num_learnt_tokens=self._state.num_learnt_tokens + window.num_rows)
            yield Rest.SHORT

    def _judge(self) -> Iterator[Rest]:
        """Offer what was learnt if it is better; begin again from the weights in use if it is worse."""
        learnt, windows = self._learner.weights(), self.buffer.held_out()[-_MAX_JUDGED:]
        before, after = yield from self._scores(windows, learnt)
        found = change(before, after)
        self._is_judged = True
        self._state = replace(
            self._state,
            num_judged=self._state.num_judged + 1,
            before=statistics.fmean(before),
            after=statistics.fmean(after),
        )
        if found.rises:
            self._earlier = self._in_use
            self._state = replace(self._state, num_swaps=self._state.num_swaps + 1)
            self._use(learnt)
        elif found.falls:
            self._learner.restart(self._in_use)

    def _prove(self) -> Iterator[Rest]:
        """Compare the weights in use with the earlier ones on text served since; return to those if better."""
        fresh = self.buffer.held_out(self._first_window)[-_MAX_JUDGED:]
        if self._earlier is None or len(fresh) < MIN_WINDOWS:
            return
        earlier, self._earlier = self._earlier, None
        in_use, other = yield from self._scores(fresh, earlier)
        if change(in_use, other).rises or change(other, in_use).falls:
            self._learner.restart(earlier)
            self._state = replace(self._state, num_returns=self._state.num_returns + 1)
            self._use(earlier)

    def _scores(
        self, windows: Sequence[Window], other: Weights
    ) -> Generator[Rest, None, tuple[list[float], list[float]]]:
        """Scores of the weights in use, and of `other`, along each of `windows`."""
        numbers = {window.number for window in windows}
        self._known = {number: score for number, score in self._known.items() if number in numbers}
        found: list[float] = []
        for window in windows:
            if window.number not in self._known:
                self._known[window.number] = self._learner.score(self._in_use, window)
                yield Rest.SHORT
            found.append(self._learner.score(other, window))
            yield Rest.SHORT
        return [self._known[window.number] for window in windows], found

    def _use(self, weights: Weights) -> None:
        self._in_use = weights
        self._known.clear()
        self.offer = Offer(self._state.version + 1, weights)
