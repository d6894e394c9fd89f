"""Lets the drafters of an engine learn while it serves.

The engine's thread collects rows and changes weights, between two steps only; the learner's thread does the rest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from foretoken.adapt.adaptation import Adaptation, AdaptationState, HeadLearner, Rest
from foretoken.adapt.buffer import ExampleBuffer
from foretoken.control.adaptation import AdaptConfig, ShareBudget
from foretoken.core import Request
from foretoken.draft.base import AdaptableDrafter, Drafter, DrafterKey, HiddenRows
from foretoken.draft.hidden_states import reads_hidden_states
from foretoken.heads.weights import replace_weights
from foretoken.model.interface import SharesWeights

_LONG_REST_S = 0.05  # between two looks at whether there is something to learn
_NICE = 19  # the lowest priority: a step that wants the core gets it


@cache
def can_adapt(kind: type) -> bool:
    """Whether drafters of a class are `AdaptableDrafter`s."""
    return reads_hidden_states(kind) and hasattr(kind, "drop_computed")


@dataclass
class _Trainee:
    """A drafter that learns."""

    drafter: AdaptableDrafter
    adaptation: Adaptation
    units: Iterator[Rest]


class Adapter:
    """Adapts every `AdaptableDrafter` among `drafters`, to which others may be added.

    It listens to hidden states (`draft.hidden_states.RowListener`), and is called for each request and between steps.
    """

    def __init__(self, target: SharesWeights, drafters: Mapping[DrafterKey, Drafter], config: AdaptConfig) -> None:
        self._target, self._drafters, self._config = target, drafters, config
        self._trainees: dict[DrafterKey, _Trainee] = {}
        self._new: list[tuple[DrafterKey, Sequence[HiddenRows]]] = []  # of the running step
        own = weakref.ref(self)  # the thread keeps no engine alive whose owner has dropped it without closing it
        self._background = LearnerThread(lambda: _units(own()), config.share, lambda error: _fail(own(), error))
        weakref.finalize(self, self._background.stop)
        self._is_started = self._is_closed = False
        self.error: Exception | None = None  # why learning ended

    # ---- hidden states

    def layers(self, key: DrafterKey) -> tuple[int, ...]:
        """Layers that are needed beside those that a drafter reads: the last, for what the target would have said."""
        return (self._target.num_layers,) if self._learns(key) else ()

    def read(self, key: DrafterKey, rows: Sequence[HiddenRows]) -> None:
        """Note the new rows of a drafter; they are looked at when the step is over."""
        if self._learns(key):
            self._new.append((key, rows))

    # ---- the engine's calls

    def take_on(self) -> None:
        """Begin with drafters that were added since the last call."""
        for key, drafter in self._drafters.items():
            known = self._trainees.get(key)
            if can_adapt(type(drafter)) and (known is None or known.drafter is not drafter):
                self._trainees[key] = self._trainee(cast(AdaptableDrafter, drafter))
        if self._trainees and not self._is_started:
            self._is_started = True
            self._background.start()

    def begin(self, request: Request) -> None:
        """A request was queued."""
        if self._is_closed:
            return
        self.take_on()
        for trainee in self._trainees.values():
            trainee.adaptation.buffer.begin(request.request_id, len(request.prompt_ids), request.params.greedy)

    def rejected(self, request_id: int, position: int) -> None:
        """The draft token for `position` of a request was rejected."""
        for trainee in self._trainees.values():
            trainee.adaptation.buffer.reject(request_id, position)

    def end(self, request_id: int) -> None:
        """A request is over."""
        self._collect()
        for trainee in self._trainees.values():
            trainee.adaptation.buffer.end(request_id)

    def between_steps(self) -> None:
        """Take in what the step read, and change weights that wait for it. Raises what ended the learner's thread."""
        self._collect()
        if self.error is not None:
            raise self.error
        for trainee in self._trainees.values():
            offer = trainee.adaptation.offer
            if offer is not None:
                replace_weights(trainee.drafter.head, offer.weights)
                trainee.drafter.drop_computed()
                trainee.adaptation.taken(offer)

    def close(self) -> None:
        """End learning and forget every text."""
        self._is_closed = True
        self._background.close()
        for trainee in self._trainees.values():
            trainee.adaptation.buffer.clear()
        self._new.clear()

    @property
    def states(self) -> tuple[AdaptationState, ...]:
        """What came of each drafter's learning so far."""
        return tuple(trainee.adaptation.state for trainee in self._trainees.values())

    @property
    def spent_s(self) -> float:
        """Processor time that learning has taken."""
        return self._background.spent_s

    # ---- how it is done

    def _learns(self, key: DrafterKey) -> bool:
        return not self._is_closed and key in self._trainees

    def _trainee(self, drafter: AdaptableDrafter) -> _Trainee:
        buffer = ExampleBuffer({*drafter.hidden_layers(), self._target.num_layers}, self._config.buffer_tokens)
        learner = HeadLearner(drafter.head, self._target, drafter.fixed_weights)
        adaptation = Adaptation(drafter.name, buffer, learner, self._config, time.perf_counter)
        return _Trainee(drafter, adaptation, adaptation.work())

    def _collect(self) -> None:
        new, self._new = self._new, []
        for key, rows in new:
            for one in rows:
                self._trainees[key].adaptation.buffer.add(one)


def _units(adapter: Adapter | None) -> list[Iterator[Rest]]:
    """What each drafter learns next; nothing for an adapter that is gone."""
    return [] if adapter is None else [trainee.units for trainee in list(adapter._trainees.values())]


def _fail(adapter: Adapter | None, error: Exception) -> None:
    if adapter is not None:
        adapter.error = error


class LearnerThread:
    """Takes units of work from `sources` in turn, in a thread, until closed: one core at most, at the lowest priority.

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

    def stop(self) -> None:
        """End after the unit that runs now, without waiting for it."""
        self._closed.set()

    def close(self) -> None:
        """The same, and wait."""
        self.stop()
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
