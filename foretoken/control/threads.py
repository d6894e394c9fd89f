"""How many threads compute a step, and how they wait for each other, chosen from the times of steps.

Threads that spin while they wait answer sooner where a process has its cores alone. Beside another process they keep
the cores from the threads they wait for, and a step takes twenty times as long. Nothing of that is known beforehand,
and neighbours come and go: the ways to run are tried on single steps, and the fastest is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from foretoken.control.config import DEFAULT, ThreadConfig
from foretoken.machine.threads import Waiting


class Threading(NamedTuple):
    """A way to run a step: `waiting` threads sleep at once, or spin for some milliseconds before they do."""

    num_threads: int
    waiting: Waiting


def ways(max_threads: int, may_spin: bool, may_sleep: bool, may_reduce: bool) -> tuple[Threading, ...]:
    """The ways to run with at most `max_threads`, what is best on an idle machine first.

    `may_spin`, `may_sleep`: how threads may wait; `may_reduce`: whether fewer threads may run.
    """
    if max_threads < 2:
        return ()
    found = [Threading(max_threads, "spin")] if may_spin else []
    found += [Threading(max_threads, "sleep")] if may_sleep else []
    if may_reduce:
        found += [Threading(count, found[-1].waiting) for count in _fewer(max_threads)]
    return tuple(found)


def _fewer(max_threads: int) -> Iterator[int]:
    """One less, for a neighbour that takes one core, then halves."""
    if max_threads > 3:
        yield max_threads - 1
    count = max_threads // 2
    while count:
        yield count
        count //= 2


class ThreadTuner:
    """Chooses among ways to run; a step is `choose`, then `observe` with what it took.

    Beside other processes (`is_contended`) threads do not spin where they may sleep: one step that spins takes as long
    as twenty that do not. Where nothing is known of other processes, spinning is one way among others.
    """

    def __init__(self, allowed: tuple[Threading, ...], config: ThreadConfig = DEFAULT.threads) -> None:
        assert allowed
        self.config, self._allowed = config, allowed
        self.current = allowed[0]
        self._is_contended: bool | None = None
        self._trial: Threading | None = None
        self._tried: list[float] = []  # costs of the running trial's steps
        self._base: deque[float] = deque(maxlen=self.config.base_steps)  # costs of the present way's steps
        self._ratios: dict[Threading, float] = {}  # cost by that of the present way, as far as tried
        self._untried_steps: dict[Threading, int] = {}
        self._weight = 1.0  # of the step that ran last
        self._credit_s = 0.0
        self._num_slow = self._num_fast = 0
        self._paced_at_s = -self.config.min_pace_s

    @property
    def is_trial(self) -> bool:
        """Whether the step tries another way than the present one."""
        return self._trial is not None

    def present(self, is_contended: bool | None) -> Threading:
        """How to run a step whose time cannot be compared with others'; `is_contended`: whether other processes need
        the cores, None if unknown.
        """
        if is_contended != self._is_contended:
            self._is_contended = is_contended
            self._forget()
            self.current = self._ways()[0]
        return self.current

    def choose(self, is_contended: bool | None) -> Threading:
        """How to run the next step, whose time `observe` takes in."""
        self.present(is_contended)
        if self._trial is None:
            self._trial = self._due()
            self._tried = []
        return self._trial or self.current

    def observe(self, seconds: float, weight: float, now_s: float) -> None:
        """Take in a step that `choose` was asked for: what it took, and what such a step weighs beside others."""
        cost = seconds / weight
        if self._trial is not None:
            self._tried.append(cost)
            is_lost = cost > self.config.abort_ratio * max(self._base)
            if is_lost or len(self._tried) >= self.config.trial_steps:
                self._judge(self._trial, cost if is_lost else median(self._tried), seconds / cost)
            return
        self._weight = weight
        for way in self._untried_steps:
            self._untried_steps[way] += 1
        if self._is_new_pace(cost, now_s):
            self._forget()
        self._base.append(cost)
        self._credit_s = min(self._trial_s(), self._credit_s + self.config.trial_share * seconds)

    def _ways(self) -> list[Threading]:
        """Those that may run now, never none."""
        calm = [way for way in self._allowed if way.waiting == "sleep"]
        return calm if self._is_contended and calm else list(self._allowed)

    def _due(self) -> Threading | None:
        """The way to try now: one of which nothing is known, else the one untried longest that can be afforded."""
        if len(self._base) < self.config.min_base_steps:
            return None
        others = [way for way in self._ways() if way != self.current]
        unknown = next((way for way in others if way not in self._ratios), None)
        if unknown is not None or not others:
            return unknown
        oldest = max(others, key=lambda way: self._untried_steps[way])
        return oldest if self._credit_s >= self._risk(oldest) else None

    def _risk(self, way: Threading) -> float:
        """What trying a way is expected to lose, in seconds: one step, where that ends the trial, or all of them."""
        ratio = self._ratios[way]
        is_lost = ratio * median(self._base) > self.config.abort_ratio * max(self._base)
        loss = (ratio - 1) / (self.config.trial_steps if is_lost else 1)
        return self._trial_s() * min(1.0, max(self.config.min_trial_loss, loss))  # no more than the credit can be

    def _trial_s(self) -> float:
        """What the steps of a trial take the present way."""
        return self.config.trial_steps * median(self._base) * self._weight

    def _judge(self, way: Threading, cost: float, weight: float) -> None:
        base, known = median(self._base), self._ratios.get(way)
        ratio = cost / base
        lost_s = sum(max(0.0, one - base) for one in self._tried) * weight
        self._credit_s = max(0.0, self._credit_s - max(lost_s, self.config.min_trial_loss * self._trial_s()))
        if known is not None and max(known / ratio, ratio / known) >= self.config.new_pace_ratio:
            self._ratios.clear()
        self._ratios[way], self._untried_steps[way] = ratio, 0
        if ratio < 1 - self.config.min_gain:
            self._ratios = {one: other / ratio for one, other in self._ratios.items() if one != way}
            self._ratios[self.current], self._untried_steps[self.current] = 1 / ratio, 0
            self.current = way
            self._base.clear()
            self._base.extend(self._tried)
        self._trial = None

    def _is_new_pace(self, cost: float, now_s: float) -> bool:
        """Whether steps changed as by a neighbour that came or went."""
        if len(self._base) < self.config.min_base_steps:
            return False
        ratio = cost / median(self._base)
        self._num_slow = self._num_slow + 1 if ratio >= self.config.new_pace_ratio else 0
        self._num_fast = self._num_fast + 1 if ratio <= 1 / self.config.new_pace_ratio else 0
        if max(self._num_slow, self._num_fast) < self.config.new_pace_steps:
            return False
        if now_s - self._paced_at_s < self.config.min_pace_s:
            return False
        self._paced_at_s = now_s
        return True

    def _forget(self) -> None:
        """Nothing that was measured holds any more."""
        self._trial = None
        self._tried = []
        self._base.clear()
        self._ratios.clear()
        self._untried_steps.clear()
        self._num_slow = self._num_fast = 0
