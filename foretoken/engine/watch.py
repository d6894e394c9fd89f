"""Who looks on while the engine works: a trace on disk, the shadow that scores answers again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from foretoken.core import BatchEntry, Draft, StepOutput, Verdict
from foretoken.engine.request import RequestState


@dataclass
class StepClock:
    """When each phase of the running step ended, in seconds of `time.perf_counter`, and what lies between.

    `taught_s` is the part of the commit that drafters took: it counts as drafting.
    """

    began: float = 0.0
    scheduled: float = 0.0
    proposed: float = 0.0
    forwarded: float = 0.0
    verified: float = 0.0
    committed: float = 0.0
    observed: float = 0.0
    emitted: float = 0.0
    taught_s: float = 0.0

    @property
    def schedule_s(self) -> float:
        """Choosing who takes part, and with how many drafted tokens."""
        return self.scheduled - self.began

    @property
    def draft_s(self) -> float:
        """Guessing, and telling the drafters what was emitted."""
        return self.proposed - self.scheduled + self.taught_s

    @property
    def target_s(self) -> float:
        """The target's forward, and the distributions of its rows."""
        return self.forwarded - self.proposed

    @property
    def rule_s(self) -> float:
        """Deciding which drafted tokens are accepted."""
        return self.verified - self.forwarded

    @property
    def commit_s(self) -> float:
        """Keeping what stands in the target's cache."""
        return self.committed - self.verified - self.taught_s

    @property
    def observe_s(self) -> float:
        """Learning from the step and sharing out its time."""
        return self.observed - self.committed

    @property
    def emit_s(self) -> float:
        """Tokens, text and log-probabilities for the caller, and what watchers make of them."""
        return self.emitted - self.observed


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
