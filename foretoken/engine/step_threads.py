"""The threads of an engine's steps: chosen before each, told what it took, and given back."""

from __future__ import annotations

import os
import time

import torch

from foretoken.control.config import DEFAULT, ThreadConfig
from foretoken.control.cost import CostTable
from foretoken.control.threads import Threading, ThreadTuner, ways
from foretoken.machine.neighbours import ContentionWatch
from foretoken.machine.threads import current_waiting, may_change, names_number, set_waiting, waiting_of

_watch = ContentionWatch()  # one for all engines of the process: they share its threads


class StepThreads:
    """How the steps of one engine run: with torch's number of threads at most, and never more.

    `adapts` is False where the number of threads is part of what is promised, or has no say: then nothing is changed. A
    number that is set by a variable stands, and so does a way of waiting. A new number of torch's, set between two
    steps, is the most from then on.
    """

    def __init__(self, adapts: bool, watch: ContentionWatch = _watch, config: ThreadConfig = DEFAULT.threads) -> None:
        self._adapts, self._watch, self._config = adapts, watch, config
        self._max_threads = 0
        self._tuner: ThreadTuner | None = None
        self._is_changed = False  # by the step that runs

    @property
    def is_trial(self) -> bool:
        """Whether the step that runs, or ran last, tries another way than the one found best."""
        return self._tuner is not None and self._tuner.is_trial

    @property
    def current(self) -> Threading:
        """The way found best so far."""
        return Threading(torch.get_num_threads(), current_waiting()) if self._tuner is None else self._tuner.current

    def begin(self, is_decoding: bool, began_s: float) -> None:
        """The work of a step begins that began at `began_s`; `is_decoding`: it reads no prompt, so that its time may be
        compared with others'.
        """
        if not self._adapts:
            return
        num_threads = torch.get_num_threads()
        if num_threads != self._max_threads:
            self._max_threads, self._tuner = num_threads, _tuner(num_threads, self._config)
        if self._tuner is None:
            return
        is_contended = self._watch.is_contended(num_threads, began_s)
        way = self._tuner.choose(is_contended) if is_decoding else self._tuner.present(is_contended)
        set_waiting(way.waiting)
        if way.num_threads != num_threads:
            torch.set_num_threads(way.num_threads)
            self._is_changed = True

    def end(self) -> None:
        """A step is over, however it ended: torch's number of threads is what it was."""
        if self._tuner is not None:
            self._watch.rest()
        if self._is_changed:
            torch.set_num_threads(self._max_threads)
            self._is_changed = False

    def observe(self, num_rows: int, seconds: float, cost: CostTable) -> None:
        """Take in what the target took for the rows of a step that was decoding; `cost` tells rows' weights."""
        if self._tuner is not None:
            weight = 1.0 if cost.is_empty else cost.seconds(num_rows) / cost.speed_factor
            self._tuner.observe(seconds, weight, time.perf_counter())


def _tuner(max_threads: int, config: ThreadConfig) -> ThreadTuner | None:
    """The tuner of what may be changed here, None where nothing may."""
    is_free = may_change()
    spins = waiting_of(os.environ) == "spin"
    found = ways(max_threads, is_free or spins, is_free or not spins, not names_number(os.environ))
    return ThreadTuner(found, config) if len(found) > 1 else None
