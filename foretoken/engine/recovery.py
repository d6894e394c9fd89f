"""Exceptions inside the engine: contained and told, or recovered from; no other request fails, no cache block is lost.

A step changes a request's text only when it emits. So whatever a step has done to caches and drafters before it raised
can be discarded and repeated: randomness is a function of the position, so the tokens are the same. After a fault every
request of the step releases its cache and runs again alone, one per step, until it has emitted. A request that raises
again while alone ends with an `EngineError`; the others continue together.

A step for which the device has no memory is too large rather than faulty: its requests go on in smaller steps
(`memory_pressure`), the most urgent half of them first. A request ends with a `CapacityError` only if it does
not fit alone, without a draft and in small pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from foretoken.control.queue import SchedulerConfig
from foretoken.engine.request import RequestState
from foretoken.engine.stats import EngineStats
from foretoken.engine.watch import Watcher
from foretoken.errors import CapacityError, EngineError, RankError, warn

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine


MIN_PROMPT_TOKENS = 16  # of a step: below, a step costs the same and reads less
PATIENCE_STEPS = 32  # without such an error, until steps may be twice as large again


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that memory could not be had: of a device, or of the machine."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch's own on a CPU
            return True
        error = error.__cause__
    return False


class MemoryPressure:
    """Limits on a step beside those of `SchedulerConfig`; None: no limit.

    `max_requests` may run at once, and a step reads at most `max_prompt_tokens` of prompts. A request that runs alone
    makes no draft tokens, but for those on which the draws of its seed depend.
    """

    def __init__(self) -> None:
        self.max_requests: int | None = None
        self.max_prompt_tokens: int | None = None
        self._num_quiet = 0  # steps since the limits were set

    @property
    def is_tight(self) -> bool:
        """Whether draft tokens have to go, too: one request runs at a time."""
        return self.max_requests == 1

    def shrink(self, num_requests: int, config: SchedulerConfig) -> bool:
        """A step of `num_requests` was too large; False if no smaller step is left to try."""
        self._num_quiet = 0
        smallest = min(MIN_PROMPT_TOKENS, config.max_prompt_tokens)
        was_smallest = self.is_tight and self.max_prompt_tokens == smallest
        if num_requests <= 1 and was_smallest:
            return False
        known = config.max_prompt_tokens if self.max_prompt_tokens is None else self.max_prompt_tokens
        self.max_requests, self.max_prompt_tokens = max(1, num_requests // 2), max(smallest, known // 2)
        return True

    def begin_step(self, config: SchedulerConfig) -> None:
        """Another step; limits that have lasted for long enough are doubled, or end."""
        if self.max_requests is None or self.max_prompt_tokens is None:
            return
        self._num_quiet += 1
        if self._num_quiet <= PATIENCE_STEPS:
            return
        self._num_quiet = 0
        self.max_requests, self.max_prompt_tokens = 2 * self.max_requests, 2 * self.max_prompt_tokens
        if self.max_requests >= config.max_batch_size and self.max_prompt_tokens >= config.max_prompt_tokens:
            self.max_requests = self.max_prompt_tokens = None

    def narrowed(self, config: SchedulerConfig) -> SchedulerConfig:
        """`config` with the smaller limit on prompts; a batch limit there would change what seeds draw."""
        most = self.max_prompt_tokens
        if most is None or most >= config.max_prompt_tokens:
            return config
        return replace(config, max_prompt_tokens=most)


class Faults:
    """Counts contained exceptions (`EngineStats.num_faults`) and warns about them."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def tell(self, what: str, error: Exception, consequence: str) -> None:
        """Count a fault and warn: the place, the error, and the consequence."""
        self._stats.num_faults += 1
        warn(f"{what} raised {type(error).__name__}: {error}; {consequence}", stacklevel=3)

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
    """The error of a request that cannot continue, with its cause attached; a lost rank is everybody's error."""
    if isinstance(error, RankError):
        return error
    broken = EngineError(f"{what}: {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken


def recover(engine: Engine, error: BaseException) -> None:
    """Restore the engine after a step that raised `error` in any phase.

    A `BaseException` that is not an `Exception` (an interrupt) is not the fault of a request: all continue together.
    """
    # Ranks that ended for want of memory are ended: no smaller step runs on them.
    if isinstance(error, Exception) and not isinstance(error, RankError) and is_out_of_memory(error):
        _shrink(engine, error)
        return
    scheduler = engine.scheduler
    is_fault, was_alone = isinstance(error, Exception), bool(scheduler.alone)
    for state in scheduler.interrupted():
        if state.finish_reason is not None:
            engine.release(state)  # its answer is complete and was returned
        elif is_fault and (was_alone or isinstance(error, RankError)):  # without all ranks nothing runs again
            _end(engine, state, engine_error("a step of the engine failed", error))
        else:
            _run_again(engine, state, alone=is_fault)
    if isinstance(error, Exception) and not isinstance(error, RankError):
        ends = "the request that ran alone in it fails" if was_alone else "its requests run again, one by one"
        engine.faults.tell("a step of the engine", error, ends)


def _shrink(engine: Engine, error: Exception) -> None:
    """Queue the requests of a step that was too large; as many as may run now join the next one, most urgent first."""
    clear_frames(error.__traceback__)  # they hold the step's tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    scheduler, states = engine.scheduler, engine.scheduler.interrupted()
    fits_smaller = scheduler.pressure.shrink(len(states), scheduler.config)
    for state in states:
        if state.finish_reason is not None:
            engine.release(state)  # its answer is complete and was returned
        elif fits_smaller:
            _run_again(engine, state, alone=state.request_id in scheduler.alone)
        else:
            _end(engine, state, _too_large(state, error))
    pressure = scheduler.pressure
    ends = f"its requests run again, at most {pressure.max_requests} at once" if fits_smaller else "the request fails"
    engine.faults.tell("a step of the engine", error, ends)


def _end(engine: Engine, state: RequestState, error: Exception) -> None:
    """End a request; its sequence is closed first, which may be open though the request does not run yet."""
    with engine.faults.contained("the target's cache", f"what it holds of request {state.request_id} may be lost"):
        engine.scheduler.set_back(state, alone=False)
    engine.fail(state, error)


def _too_large(state: RequestState, error: Exception) -> CapacityError:
    """The error of a request for which the device has no memory, whatever runs beside it."""
    refused = CapacityError(
        f"out of device memory: {len(state.tokens)} tokens do not fit beside weights and cache, with no other request "
        f"running; lower cache_tokens, shorten the prompt, or quantise the draft ({type(error).__name__}: {error})"
    )
    refused.__cause__ = error
    return refused


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
