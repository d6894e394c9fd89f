"""Recovery after an exception inside the engine: no other request fails and no cache block is lost.

A step changes a request's text only when it emits. So whatever a step has done to caches and drafters before it raised
can be discarded and repeated: randomness is a function of the position, so the tokens are the same. After a fault every
request of the step releases its cache and runs again alone, one per step, until it has emitted. A request that raises
again while alone ends with an `EngineError`; the others continue together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.engine.request import RequestState
from foretoken.engine.watch import Watcher
from foretoken.errors import EngineError

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.stats import EngineStats


class Faults:
    """Counts contained exceptions (`EngineStats.num_faults`) and warns about them."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def tell(self, what: str, error: Exception, consequence: str) -> None:
        """Count a fault and warn: the place, the error, and the consequence.

        Where the caller's filters turn warnings into errors, the fault is only counted: generation continues.
        """
        self._stats.num_faults += 1
        with suppress(Warning):
            warnings.warn(f"{what} raised {type(error).__name__}: {error}; {consequence}", stacklevel=3)

    @contextmanager
    def contained(self, what: str, consequence: str) -> Iterator[None]:
        """Run the body; an exception is counted and suppressed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - contains any error
            self.tell(what, error, consequence)

    def watch(self, watchers: list[Watcher], call: Callable[[Watcher], None]) -> None:
        """Call every observer; one that raises is removed and closed."""
        for watcher in tuple(watchers):
            try:
                call(watcher)
            except Exception as error:  # noqa: BLE001 - an observer must not fail a request
                watchers[:] = [other for other in watchers if other is not watcher]
                name = type(watcher).__name__
                with self.contained(f"closing the observer {name}", "it is left open"):
                    watcher.close()
                self.tell(f"the observer {name}", error, "it is removed, and generation continues")


def engine_error(what: str, error: BaseException) -> EngineError:
    """The error of a request that cannot continue, with its cause attached."""
    broken = EngineError(f"{what}: {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken


def recover(engine: Engine, error: BaseException) -> None:
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


def _run_again(engine: Engine, state: RequestState, alone: bool) -> None:
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
