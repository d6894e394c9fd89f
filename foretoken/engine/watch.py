"""Who looks on while the engine works: a trace on disk, the shadow that scores answers again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foretoken.core import BatchEntry, Draft, StepOutput, Verdict
from foretoken.engine.request import RequestState


@dataclass
class StepClock:
    """When each phase of the running step ended, in seconds of `time.perf_counter`."""

    began: float = 0.0
    scheduled: float = 0.0
    proposed: float = 0.0
    forwarded: float = 0.0
    verified: float = 0.0


@dataclass(frozen=True)
class RoundView:
    """One request's round, as a watcher sees it: request `b` of the draft and of the verdict, and what was emitted."""

    entry: BatchEntry
    draft: Draft
    verdict: Verdict
    b: int
    output: StepOutput
    clock: StepClock


class Watcher(Protocol):
    """Is told what happened; changes nothing about it."""

    def begin(self, state: RequestState) -> None:
        """A request was queued."""

    def round(self, view: RoundView) -> None:
        """A request finished a round."""

    def end(self, state: RequestState) -> None:
        """A request finished, failed or was dropped; its memory is already free."""

    def between_steps(self) -> None:
        """A step is over: the place for a bounded piece of background work."""

    def close(self) -> None:
        """The engine closes."""
