"""One thread runs the engine, any number of threads and coroutines submit to it.

Submitters never touch the engine: what they want goes through a queue of commands that the engine's thread empties
between two steps, and what a step emitted comes back through each request's ticket. Leaving a ticket (cancelling,
closing a stream) frees everything the request held before the next step begins.

Every ticket ends. A command is queued under the same lock under which the thread takes its last ones, so a request is
either refused or seen; what the thread has not ended when it stops, for whatever reason, it ends then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.engine.admission import Prompt, as_prompt, check_limits, check_params, check_types
from foretoken.engine.engine import Engine
from foretoken.engine.llm import LLM
from foretoken.engine.output import GenerateOutput, answer_of, each_answer, unanswered
from foretoken.engine.recovery import engine_error
from foretoken.engine.request import RequestState
from foretoken.engine.ticket import Ticket
from foretoken.errors import EngineError, InputError, OverloadedError

_Command = Callable[[Engine], None]


@dataclass(eq=False)
class _Order:
    """What a ticket was issued for; `state` is None until the engine's thread has begun it."""

    prompt: Prompt
    params: SamplingParams
    spec: SpecConfig
    state: RequestState | None = None


class AsyncEngine:
    """Owns `llm` while it is open: nobody else may run requests there. At most `max_waiting` requests wait for a place
    in the batch.

    Raises:
        InputError: `llm` was closed, answers requests, or has an owner already.
    """

    def __init__(self, llm: LLM, max_waiting: int = 256) -> None:
        if not isinstance(llm, LLM):
            raise InputError("llm", llm, "give an LLM")
        check_limits(max_waiting=max_waiting)
        self.llm, self.max_waiting = llm, max_waiting
        self._orders: dict[Ticket, _Order] = {}  # of all tickets that have not ended
        self._tickets: dict[int, Ticket] = {}  # of those that were begun, by request
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._num_unborn = 0  # submitted, not yet seen by the engine's thread
        self._is_closing = False
        self._cause: BaseException | None = None  # why the thread ended, where nobody closed
        self._process = os.getpid()
        engine = llm.claim(self)
        self._thread = threading.Thread(target=self._run, args=(engine,), name="foretoken-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            llm.disclaim()
            raise

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> Ticket:
        """Queue one answer; a drafter named for the first time is loaded in the caller's thread.

        Raises:
            InputError: a parameter that cannot be honoured, or this was closed. What only the engine can see comes with
            the ticket.
            OverloadedError: `max_waiting` requests wait already.
            EngineError: the engine's thread has broken down.
        """
        self.check_process()
        params, spec = SamplingParams() if params is None else params, self.llm.spec if spec is None else spec
        one = as_prompt(prompt)
        check_types(params, spec)
        if params.n > 1:
            raise InputError("n", params.n, "a ticket is one answer; use generate, or one ticket per answer")
        self._check_open()
        self.llm.prepare(spec)
        ticket, order = Ticket(self), _Order(one, params, spec)
        with self._wake:
            self._check_open()
            if len(self.llm.engine.scheduler.waiting) + self._num_unborn >= self.max_waiting:
                raise OverloadedError(
                    f"{self.max_waiting} requests wait already: come again later, or raise max_waiting"
                )
            self._num_unborn += 1
            self._orders[ticket] = order
            self._commands.append(lambda _engine: self._begin(ticket, order))
            self._wake.notify()
        return ticket

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> AsyncIterator[StepOutput]:
        """What each step adds to one answer; leaving the iteration frees the request."""
        async with contextlib.aclosing(aiter(self.submit(prompt, params, spec))) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> GenerateOutput:
        """The whole answer to one prompt, all `n` of them."""
        params = SamplingParams() if params is None else params
        check_params(params)
        tickets: list[Ticket] = []
        try:
            for one in each_answer(params):
                tickets.append(self.submit(prompt, one, spec))
            first, *others = await asyncio.gather(*(ticket.wait() for ticket in tickets))
        finally:
            for ticket in tickets:  # those that have ended do not mind
                ticket.cancel()
        return replace(first, others=tuple(others))

    def cancel(self, ticket: Ticket) -> None:
        """Leave a ticket, from any thread; one that has ended is not changed."""
        with self._wake:
            if ticket in self._orders:
                self._commands.append(lambda engine: self._leave(engine, ticket))
                self._wake.notify()

    def close(self) -> None:
        """Stop after the step that runs now; requests that have not ended are aborted. Closing again does nothing.

        Any thread may close; the engine's own (a watcher) does not wait for itself.
        """
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread and os.getpid() == self._process:
            self._thread.join()

    def check_process(self) -> None:
        """Refuse a process that was forked from the one that opened this: it has no engine thread.

        Raises:
            InputError: it is such a process.
        """
        if os.getpid() != self._process:
            raise InputError(
                "engine",
                f"opened in process {self._process}",
                "has no thread in a forked process; open an AsyncEngine after the fork",
            )

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._cause is not None:
            raise engine_error("the engine's thread has broken down, open a new AsyncEngine", self._cause)
        if self._is_closing:
            raise InputError("engine", "closed", "was closed; open it again")

    # ---- the engine's thread

    def _run(self, engine: Engine) -> None:
        cause: BaseException | None = None
        try:
            while self._turn(engine):
                pass
        except BaseException as error:  # noqa: BLE001 - nothing runs behind this thread: those who wait must hear of it
            cause = error
        with self._wake:  # from here on nothing is queued
            self._is_closing, self._cause = True, cause
            self._commands.clear()
        broken = None if cause is None else engine_error("the engine's thread has broken down", cause)
        for ticket in list(self._orders):
            self._drop(engine, ticket, broken)
        self.llm.disclaim()

    def _turn(self, engine: Engine) -> bool:
        """What was asked for since the last step, then a step; False when it is time to stop."""
        with self._wake:
            while not (self._commands or engine.has_work or self._is_closing):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            is_closing = self._is_closing
        for command in commands:
            command(engine)
        if is_closing:
            return False
        if engine.has_work:
            self._step(engine)
        return True

    def _step(self, engine: Engine) -> None:
        try:
            outputs: Sequence[StepOutput] = self.llm.step_for(self)
        except Exception as error:  # noqa: BLE001 - what recovery could not mend costs those who run, not those who come
            broken = engine_error("the engine could not recover from a step that broke down", error)
            for ticket in list(self._tickets.values()):
                self._drop(engine, ticket, broken)
            return
        for output in outputs:
            if (reader := self._tickets.get(output.request_id)) is None:
                continue
            if output.error is None:
                reader.put(output)
            if output.finish_reason is not None:
                self._end(reader, output.error)

    def _begin(self, ticket: Ticket, order: _Order) -> None:
        with self._wake:
            self._num_unborn -= 1
        if ticket not in self._orders:
            return  # cancelled before
        try:
            order.state = self.llm.submit_for(self, order.prompt, order.params, order.spec)
        except Exception as error:  # noqa: BLE001 - belongs to who submitted
            del self._orders[ticket]
            ticket.end(None, error)
            return
        self._tickets[order.state.request_id] = ticket

    def _leave(self, engine: Engine, ticket: Ticket) -> None:
        """Abort the request of a ticket that was cancelled; it may have ended meanwhile."""
        if ticket in self._orders:
            self._drop(engine, ticket, None)

    def _drop(self, engine: Engine, ticket: Ticket, error: EngineError | None) -> None:
        """End a ticket whose request has not: cancelled, closed, or broken by `error`."""
        state = self._orders[ticket].state
        if state is not None:
            try:
                engine.abort(state.request_id)
            except Exception as broken:  # noqa: BLE001 - its ticket must end all the same
                error = error or engine_error("the request could not be aborted", broken)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        order = self._orders.pop(ticket)
        if order.state is None:
            ticket.end(None if error is not None else unanswered(order.prompt, order.params), error)
            return
        del self._tickets[order.state.request_id]
        answer = answer_of(order.state)
        ticket.end(answer if error is None else replace(answer, finish_reason="error", error=error), error)
