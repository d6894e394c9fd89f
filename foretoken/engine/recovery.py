"""What follows a call that raised inside the engine: nobody else's request and no block of the cache is lost.

A step changes a request's text only at its very end, when it emits. So whatever a step has done to caches and drafters
before it raised can be thrown away and done again: randomness is a function of the position, and the same tokens come
out. After a fault every request of the step gives its cache back and runs again alone, one per step, until it has
emitted. A request that makes the step raise again while it is alone ends with an `EngineError`; the others go on
together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.engine.controller import Controller, DraftPlan
from foretoken.engine.request import RequestState
from foretoken.engine.watch import Watcher
from foretoken.errors import EngineError

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.engine.stats import EngineStats


class Faults:
    """Counts what raised and was contained (`EngineStats.num_faults`), and warns of it."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def tell(self, what: str, error: Exception, consequence: str) -> None:
        """Count a fault and warn: what raised, which error, and what becomes of it."""
        self._stats.num_faults += 1
        warnings.warn(f"{what} raised {type(error).__name__}: {error}; {consequence}", stacklevel=3)

    @contextmanager
    def contained(self, what: str, consequence: str) -> Iterator[None]:
        """Run the body; an error in it is told and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - that is what it is for
            self.tell(what, error, consequence)

    def watch(self, watchers: list[Watcher], call: Callable[[Watcher], None]) -> None:
        """Call every watcher; one that raises is taken off the list and closed."""
        for watcher in tuple(watchers):
            try:
                call(watcher)
            except Exception as error:  # noqa: BLE001 - no request may suffer from whoever looks on
                watchers[:] = [other for other in watchers if other is not watcher]
                name = type(watcher).__name__
                with self.contained(f"closing the watcher {name}", "it is left as it is"):
                    watcher.close()
                self.tell(f"the watcher {name}", error, "it is taken off, and answers go on")


def engine_error(what: str, error: BaseException) -> EngineError:
    """The error of a request that cannot go on, with its cause attached."""
    broken = EngineError(f"{what}: {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken


def recover(engine: Engine, error: BaseException) -> None:
    """Put the engine in order after a step that raised `error`, wherever it stood.

    What is no `Exception` (an interrupt) says nothing about the requests: they go on together.
    """
    scheduler = engine.scheduler
    is_fault, was_alone = isinstance(error, Exception), bool(scheduler.alone)
    for state in scheduler.interrupted():
        if state.finish_reason is not None:
            engine.release(state)  # its answer was complete, and had been returned
        elif is_fault and was_alone:
            engine.fail(state, engine_error("a step of the engine broke down", error))
        else:
            _run_again(engine, state, alone=is_fault)
    if isinstance(error, Exception):
        ends = "the request that ran alone in it fails" if was_alone else "its requests run again, one by one"
        engine.faults.tell("a step of the engine", error, ends)


def _run_again(engine: Engine, state: RequestState, alone: bool) -> None:
    """Queue a request again as it was before the step; its drafters begin anew from its text."""
    try:
        engine.scheduler.set_back(state, alone)
        engine.drafters.finish(state.request)
        engine.drafters.start(replace(state.request, prompt_ids=tuple(state.tokens)))
    except Exception as error:  # noqa: BLE001 - cache or drafters are beyond repair for this request
        engine.fail(state, engine_error("the request could not be run again after a step that broke down", error))
        return
    state.stats.num_preempted += 1
    engine.stats.num_preempted += 1


def plans_of(controller: Controller, faults: Faults) -> Callable[[Sequence[RequestState]], Sequence[DraftPlan]]:
    """The controller's plans of a step; where it raises, none of its drafted tokens."""

    def plan(states: Sequence[RequestState]) -> Sequence[DraftPlan]:
        try:
            return controller.plan(states)
        except Exception as error:  # noqa: BLE001 - plain decoding needs no controller
            faults.tell("the controller", error, "this step makes no guesses that are left to it")
            return [_plan_alone(state) for state in states]

    return plan


def _plan_alone(state: RequestState) -> DraftPlan:
    """What a request may draft when the controller raised: what its caller set stands, what is left open is nothing."""
    spec = state.request.spec
    if spec.num_draft == "auto" or spec.draft_probability == "auto" or len(spec.arms) != 1:
        return DraftPlan(0)
    return DraftPlan(spec.num_draft, spec.draft_probability, 0)
