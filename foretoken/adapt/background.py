"""The thread that learns: one core at most, at the lowest priority, and no more of that than its share."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from foretoken.adapt.adaptation import Rest
from foretoken.control.adaptation import ShareBudget

_LONG_REST_S = 0.05  # between two looks at whether there is something to learn
_NICE = 19  # the lowest priority: a step that wants the core gets it


class LearnerThread:
    """Takes units of work from `sources` in turn, in a thread, until closed.

    A source is a generator of `Adaptation.work`; `sources` is asked before every round of units, since drafters may be
    added. Where a unit raises, `on_error` gets the exception and the thread ends.
    """

    def __init__(
        self, sources: Callable[[], list[Iterator[Rest]]], share: float, on_error: Callable[[Exception], None]
    ) -> None:
        self._sources, self._on_error = sources, on_error
        self._budget = ShareBudget(share, _num_cores(), time.perf_counter())
        self._closed, self._started = threading.Event(), threading.Event()
        self.spent_s = 0.0  # of processor time
        self._thread = threading.Thread(target=self._run, name="foretoken-adapt", daemon=True)

    def start(self) -> None:
        """Begin. The thread's own number of threads for matrices is 1; that of others stays as it is."""
        before = torch.get_num_threads()
        self._thread.start()
        self._started.wait()
        torch.set_num_threads(before)  # torch keeps one number for the thread that sets it and for all new ones

    def close(self) -> None:
        """End after the unit that runs now."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes over the number of new threads when it first asks: not the next one
        self._started.set()
        if sys.platform == "linux":  # elsewhere a priority is that of the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while not self._closed.is_set():
                self._round()
        except Exception as error:  # noqa: BLE001 - whatever learning raises ends learning, and nothing else
            self._on_error(error)

    def _round(self) -> None:
        """A unit of every source."""
        is_idle = True
        for source in self._sources():
            before_s = time.thread_time()
            is_idle &= next(source) is Rest.LONG
            spent_s = time.thread_time() - before_s
            self.spent_s += spent_s
            self._closed.wait(self._budget.pause_s(time.perf_counter(), spent_s))
        if is_idle:
            self._closed.wait(_LONG_REST_S)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
