"""Observer hooks: the event log, the shadow checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard

from foretoken.control.candidates import NoDraftReason
from foretoken.core import BatchEntry, Draft, StepOutput, Verdict
from foretoken.engine.request import RequestState


@dataclass
class StepClock:
    """When each phase of the running step ended, in seconds of `time.perf_counter`, and the durations.

    `taught_s` is the part of the commit phase spent in drafters: it counts as drafting.
    """

    began: float = 0.0
    scheduled: float = 0.0
    proposed: float = 0.0
    forwarded: float = 0.0
    verified: float = 0.0
    committed: float = 0.0
    observed: float = 0.0
    emitted: float = 0.0
    preview_s: float = 0.0
    taught_s: float = 0.0

    @property
    def schedule_s(self) -> float:
        """Choosing requests, drafters and numbers of drafted tokens."""
        return self.scheduled - self.began - self.preview_s

    @property
    def draft_s(self) -> float:
        """Drafting: proposing, and committing what was emitted to the drafters."""
        return self.preview_s + self.proposed - self.scheduled + self.taught_s

    @property
    def target_s(self) -> float:
        """The target's forward and its probabilities."""
        return self.forwarded - self.proposed

    @property
    def rule_s(self) -> float:
        """Verification."""
        return self.verified - self.forwarded

    @property
    def commit_s(self) -> float:
        """Committing accepted tokens to the target's cache."""
        return self.committed - self.verified - self.taught_s

    @property
    def observe_s(self) -> float:
        """Updating the controller and attributing the time of the step."""
        return self.observed - self.committed

    @property
    def emit_s(self) -> float:
        """Tokens, text and log-probabilities for the caller, and observers."""
        return self.emitted - self.observed

    @property
    def host_s(self) -> float:
        """All but drafting and the target's pass with its verification."""
        return self.schedule_s + self.commit_s + self.observe_s + self.emit_s


@dataclass(frozen=True)
class RoundView:
    """One request's round for observers: request `b` of draft and verdict, and what was emitted.

    `why_none` says why nothing was drafted; None where something was, and for plain decoding.
    """

    entry: BatchEntry
    draft: Draft
    verdict: Verdict
    b: int
    output: StepOutput
    clock: StepClock
    why_none: NoDraftReason | None = None


class Watcher(Protocol):
    """Observer of the engine; changes no answer. What a class that inherits it leaves out is nothing to it."""

    def begin(self, state: RequestState) -> None:
        """A request was queued."""

    def end(self, state: RequestState) -> None:  # noqa: ARG002
        """A request finished, failed or was cancelled; its memory is already free."""
        return

    def between_steps(self) -> None:
        """After a step: the place for a bounded amount of background work."""
        return

    def close(self) -> None:
        """The engine closes."""
        return


class RoundWatcher(Watcher, Protocol):
    """An observer of every round too; without one, no views of rounds are made."""

    def round(self, view: RoundView) -> None:
        """A request finished a round."""


def sees_rounds(watcher: Watcher) -> TypeGuard[RoundWatcher]:
    """Whether an observer looks at rounds; `isinstance` of a protocol takes ten times as long."""
    return hasattr(watcher, "round")


def show_round(watcher: Watcher, view: RoundView) -> None:
    """Show a round to an observer that looks at rounds."""
    if sees_rounds(watcher):
        watcher.round(view)
