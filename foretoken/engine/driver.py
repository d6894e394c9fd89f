"""Runs the steps of an engine in the threads that wait for answers.

Whoever waits runs steps, and every step advances all requests. What a step emits for a request of another caller waits
in that caller's inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

from foretoken.core import StepOutput
from foretoken.engine.engine import Engine
from foretoken.engine.request import PreparedRequest, RequestState
from foretoken.engine.turns import Turns

OnStep = Callable[[list[StepOutput]], None]


class Driver:
    """One engine and the threads that use it: every use of the engine is made under `turns.lock`.

    `check_open` raises when the engine was closed, maybe while a caller prepared its requests.
    """

    def __init__(self, engine: Engine, turns: Turns, check_open: Callable[[], object]) -> None:
        self.engine, self._turns, self._check_open = engine, turns, check_open
        self._inboxes: dict[int, deque[StepOutput]] = {}  # by request, for callers that want the outputs

    def enqueue(self, prepared: PreparedRequest) -> RequestState:
        """Queue one request, for callers that run the steps themselves.

        Raises:
            InputError: the engine was closed.
            EngineError: see `Engine.enqueue`.
        """
        with self._turns.lock:
            self._check_open()
            return self.engine.enqueue(prepared)

    def answer(self, prepared: Sequence[PreparedRequest], on_step: OnStep | None) -> list[RequestState]:
        """Run steps until every request has ended; `on_step` gets what each step emitted for them.

        Raises:
            InputError: the engine was closed before the requests were queued.
            EngineError: a request could not be queued; none was.
        """
        states, inbox = list[RequestState](), deque[StepOutput]()
        with self._turns:
            try:
                self._enqueue_all(prepared, states, None if on_step is None else inbox)
                running = list(states)
                while not self._advance(running):
                    if on_step is not None:
                        on_step(_taken(inbox))
                    self._turns.pause()
                if on_step is not None and inbox:
                    on_step(_taken(inbox))
            finally:
                self._leave(states)
        return states

    def stream(self, prepared: PreparedRequest) -> Generator[StepOutput, None, RequestState]:
        """Yield what each step emits for one request, and return its state; closing the generator frees the request.

        Raises:
            ForetokenError: the error of a request that failed.
        """
        states, inbox = list[RequestState](), deque[StepOutput]()
        try:
            self._enqueue_all([prepared], states, inbox)
            running = list(states)
            while True:
                with self._turns:
                    is_over = not inbox and self._advance(running)
                    self._turns.pause()
                for output in _taken(inbox):
                    is_over = False
                    if output.error is not None:
                        raise output.error
                    yield output
                if is_over:
                    return states[0]
        finally:
            self._leave(states)

    def step(self) -> list[StepOutput]:
        """One step of the engine. The lock must be held by this thread, or nobody else use the engine."""
        try:
            outputs = self.engine.step()
        except BaseException:
            self._deliver(self.engine.take_outputs())
            raise
        self._deliver(outputs)
        return outputs

    def _enqueue_all(
        self, prepared: Sequence[PreparedRequest], states: list[RequestState], inbox: deque[StepOutput] | None
    ) -> None:
        """Queue all requests or none, appending to `states`."""
        engine = self.engine
        with self._turns.lock:
            self._check_open()
            known = set(engine.states)
            try:
                for one in prepared:
                    states.append(engine.enqueue(one))
                    if inbox is not None:
                        self._inboxes[states[-1].request_id] = inbox
            except BaseException:
                for request_id in set(engine.states) - known:
                    engine.abort(request_id)
                raise

    def _leave(self, states: Sequence[RequestState]) -> None:
        """Free what has not ended; a forked process leaves that to its parent."""
        if self._turns.is_forked:
            return
        with self._turns.lock:
            for state in states:
                self._inboxes.pop(state.request_id, None)
                self.engine.abort(state.request_id)

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
            self.step()
            return False

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)


def _taken(inbox: deque[StepOutput]) -> list[StepOutput]:
    """What waits in an inbox, which is empty then."""
    return [inbox.popleft() for _ in range(len(inbox))]
