"""Recovery after an exception inside the engine: no other request fails and no cache block is lost.

A step changes a request's text only when it emits. So whatever a step has done to caches and drafters before it raised
can be discarded and repeated: randomness is a function of the position, so the tokens are the same. After a fault every
request of the step releases its cache and runs again alone, one per step, until it has emitted. A request that raises
again while alone ends with an `EngineError`; the others continue together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from foretoken.draft.group import DrafterGroup
from foretoken.engine.faults import Faults, engine_error
from foretoken.engine.request import RequestState
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.stats import EngineStats


class Recoverable(Protocol):
    """What recovery needs of an engine."""

    scheduler: Scheduler
    drafters: DrafterGroup
    faults: Faults
    stats: EngineStats

    def release(self, state: RequestState) -> None:
        """Forget a request."""

    def fail(self, state: RequestState, error: Exception) -> None:
        """End a request with an error."""


def recover(engine: Recoverable, error: BaseException) -> None:
    """Restore the engine after a step that raised `error` in any phase.

    A `BaseException` that is not an `Exception` (an interrupt) is not the fault of a request: all continue together.
    """
    scheduler = engine.scheduler
    is_fault, was_alone = isinstance(error, Exception), bool(scheduler.alone)
    for state in scheduler.interrupted():
        if state.finish_reason is not None:
            engine.release(state)  # its answer is complete and was returned
        elif is_fault and was_alone:
            engine.fail(state, engine_error("a step of the engine failed", error))
        else:
            _run_again(engine, state, alone=is_fault)
    if isinstance(error, Exception):
        ends = "the request that ran alone in it fails" if was_alone else "its requests run again, one by one"
        engine.faults.tell("a step of the engine", error, ends)


def _run_again(engine: Recoverable, state: RequestState, alone: bool) -> None:
    """Queue a request again as it was before the step; its drafters restart from its text."""
    try:
        engine.scheduler.set_back(state, alone)
        engine.drafters.finish(state.request)
        engine.drafters.start(replace(state.request, prompt_ids=tuple(state.tokens)))
    except Exception as error:  # noqa: BLE001 - the cache or drafters of this request cannot be restored
        engine.fail(state, engine_error("the request could not be run again after a failed step", error))
        return
    state.stats.num_preempted += 1
    engine.stats.num_preempted += 1
