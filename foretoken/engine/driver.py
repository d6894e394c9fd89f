"""Runs the steps of an engine: the only place that does, for whichever thread asks.

Callers of an `LLM` run steps in the threads that wait for answers; an `AsyncEngine` claims the engine and runs them in
a thread of its own. Every step advances all requests, and each output goes to the caller that queued its request.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from foretoken.core import StepOutput
from foretoken.engine.engine import Engine
from foretoken.engine.request import PreparedRequest, RequestState
from foretoken.errors import InputError
from foretoken.machine.modes import own_modes
from foretoken.machine.process import check_not_forked

OnStep = Callable[[list[StepOutput]], None]
Receiver = Callable[[StepOutput], None]

_PAUSE_S = 1e-4  # long enough for another thread to take a lock that is free
END_S = 30.0  # a step that takes longer is not waited for when the interpreter exits


class Owner(Protocol):
    """What alone runs an engine's steps while it is open: an `AsyncEngine`."""

    def close(self) -> None:
        """Stop, and give the engine back."""


class Turns:
    """`lock` is held while the engine is used: for one step, one submission. The same thread may take it again.

    A lock that is released goes to the thread that is running, so threads that take it again and again enter the turns
    for as long as they do so (`with turns`), and `pause` in between. A forked process gets neither: a thread that it
    does not have may hold the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._entered: dict[int, int] = {}  # how often, by thread
        _all_turns.add(self)

    def end(self) -> None:
        """Wait for the step that runs, and leave the turns to the calling thread for good."""
        if not self.is_forked:
            self._lock.acquire(timeout=END_S)

    @property
    def lock(self) -> threading.RLock:
        """See the class.

        Raises:
            InputError: see `check_process`.
        """
        self.check_process()
        return self._lock

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one whose threads take turns."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse (`InputError`) a fork of the process in which this was made."""
        check_not_forked("llm", self._process)

    def __enter__(self) -> None:
        self.check_process()
        mine = threading.get_ident()
        self._entered[mine] = self._entered.get(mine, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = threading.get_ident()
        self._entered[mine] -= 1
        if not self._entered[mine]:
            del self._entered[mine]

    def pause(self) -> None:
        """Let the other threads that have entered go first; costs nothing where there are none."""
        if len(self._entered) > 1:
            time.sleep(_PAUSE_S)


_all_turns: WeakSet[Turns] = WeakSet()


@atexit.register
def _end_all() -> None:
    """When the interpreter exits, let no thread be within a step: Python ends daemon threads where they stand, and one
    that stands in torch takes the process down with SIGABRT.
    """
    for turns in tuple(_all_turns):
        turns.end()


class Driver:
    """One engine and those who use it, each for one step or submission at a time.

    `name` stands for the engine in errors. `check_open` raises when it was closed, maybe while a caller prepared its
    requests; `conclude` is called when requests may have ended: before receivers get the outputs of a step.
    """

    def __init__(
        self, engine: Engine, turns: Turns, name: str, check_open: Callable[[], object], conclude: Callable[[], None]
    ) -> None:
        self.engine = engine
        self._turns, self._name, self._check_open, self._conclude = turns, name, check_open, conclude
        self.owner: Owner | None = None
        self._receivers: dict[int, Receiver] = {}  # by request, for callers that want the outputs
        self._left: deque[RequestState] = deque()  # requests whose callers have gone, until they are freed

    # ---- who may use the engine

    def claim(self, owner: Owner) -> None:
        """Let `owner` alone run requests, until `disclaim`.

        Raises:
            InputError: the engine was closed, has an owner, or still answers requests.
        """
        with self._turns.lock:
            self._check_open()
            if self.owner is not None:
                remedy = "is served by another AsyncEngine: submit to that one, or close it first"
                raise InputError("llm", self._name, remedy)
            self._free_left()
            if self.engine.has_work:
                remedy = "still answers requests: let them end, or close their streams, then open an AsyncEngine"
                raise InputError("llm", self._name, remedy)
            self.owner = owner

    def disclaim(self) -> None:
        """The owner is done."""
        self.owner = None

    def check_user(self, user: Owner | None = None) -> None:
        """Refuse all but the owner while there is one, and everybody when the engine was closed.

        Raises:
            InputError: `user` may not run requests.
        """
        self._check_open()
        if self.owner is not user:
            raise InputError("llm", self._name, "is served by an AsyncEngine: submit to that, or close it first")

    # ---- requests and steps, one by one

    def enqueue(
        self, prepared: PreparedRequest, receive: Receiver | None = None, user: Owner | None = None
    ) -> RequestState:
        """Queue one request; `receive` gets its outputs, within the step that emits them.

        Raises:
            InputError: see `check_user`; EngineError: see `Engine.enqueue`.
        """
        with self._turns, self._turns.lock, own_modes():
            self.check_user(user)
            state = self.engine.enqueue(prepared)
            if receive is not None:
                self._receivers[state.request_id] = receive
            return state

    def step(self, user: Owner | None = None) -> list[StepOutput]:
        """One step of the engine.

        Raises:
            InputError: see `check_user`.
        """
        with self._turns:
            with self._turns.lock:
                self.check_user(user)
                outputs = self._step(self._conclude)
            self._turns.pause()
        return outputs

    def leave(self, states: Sequence[RequestState]) -> None:
        """Free what has not ended; a forked process leaves that to its parent.

        A caller that is interrupted while it waits for the step of another one leaves its requests to the next step.
        """
        if self._turns.is_forked:
            return
        self._left.extend(states)
        with self._turns.lock:
            self._free_left()

    def _free_left(self) -> None:
        """Abort the requests that their callers have left; an interrupted call is taken up by the next one."""
        while self._left:
            request_id = self._left[0].request_id
            self._receivers.pop(request_id, None)
            try:
                with own_modes():
                    self.engine.abort(request_id)
            except Exception:
                self._left.popleft()  # tried again it would raise again, in the steps of others
                raise
            self._left.popleft()

    # ---- whole answers, whose callers run the steps

    def answer(self, prepared: Sequence[PreparedRequest], on_step: OnStep | None) -> list[RequestState]:
        """Run steps until every request has ended; `on_step` gets what each step emitted for them.

        Raises:
            InputError: the engine was closed or claimed before the requests were queued.
            EngineError: a request could not be queued; none was.
        """
        states, inbox = list[RequestState](), deque[StepOutput]()
        with self._turns:
            try:
                self._enqueue_all(prepared, states, None if on_step is None else inbox.append)
                running = list(states)
                while not self._advance(running):
                    if on_step is not None:
                        on_step(_taken(inbox))
                    self._turns.pause()
                if on_step is not None and inbox:
                    on_step(_taken(inbox))
            finally:
                self.leave(states)
        self._conclude()
        return states

    def stream(self, prepared: PreparedRequest) -> Generator[StepOutput]:
        """Yield what each step emits for one request; closing the generator frees the request.

        Raises:
            ForetokenError: the error of a request that failed; the engine was closed half-way.
        """
        states, inbox = list[RequestState](), deque[StepOutput]()
        try:
            self._enqueue_all([prepared], states, inbox.append)
            running = list(states)
            is_over = False
            while not is_over:
                with self._turns:
                    is_over = not inbox and self._advance(running)
                    self._turns.pause()
                for output in _taken(inbox):
                    is_over = False
                    if output.error is not None:
                        raise output.error
                    yield output
        finally:
            self.leave(states)
        self._conclude()
        if states[0].finish_reason == "abort":
            self._check_open()  # what came is not the whole answer

    def _enqueue_all(
        self, prepared: Sequence[PreparedRequest], states: list[RequestState], receive: Receiver | None
    ) -> None:
        """Queue all requests or none, appending to `states`."""
        engine = self.engine
        with self._turns, self._turns.lock:
            known = set(engine.states)
            try:
                for one in prepared:
                    states.append(self.enqueue(one, receive))
            except BaseException:
                for request_id in set(engine.states) - known:
                    engine.abort(request_id)
                raise

    def _advance(self, running: list[RequestState]) -> bool:
        """Run a step if one of `running` still needs it; whether none did.

        States that have ended leave the list at its end, where those that were queued last stand: looking at all of
        them in every step would take time in the square of their number.
        """
        with self._turns.lock:
            while running and running[-1].finish_reason is not None:
                running.pop()
            if not running:
                return True
            self._step()
            return False

    def _step(self, then: Callable[[], None] = lambda: None) -> list[StepOutput]:
        """A step, under the lock, and `then` before its outputs, or those before its error, are delivered."""
        with own_modes():
            self._free_left()
            try:
                outputs = self.engine.step()
            except BaseException:
                self._deliver(self.engine.take_outputs())
                raise
            try:
                then()
            finally:
                self._deliver(outputs)
            return outputs

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                if output.finish_reason is not None:
                    del self._receivers[output.request_id]
                receive(output)


def _taken(inbox: deque[StepOutput]) -> list[StepOutput]:
    """What waits in an inbox, which is empty then."""
    return [inbox.popleft() for _ in range(len(inbox))]
