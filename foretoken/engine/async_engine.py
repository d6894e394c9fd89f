"""One thread runs the engine, any number of threads and coroutines submit to it.

Submitters never touch the engine: what they want goes through a queue of commands that the engine's thread empties between two
steps, and what a step emitted comes back through each request's ticket. Leaving a ticket (cancelling, closing a stream) frees
everything the request held before the next step begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.engine.intake import Prompt, as_prompts, check_limits, check_types
from foretoken.engine.llm import LLM
from foretoken.engine.output import GenerateOutput, collect, each_answer
from foretoken.engine.request import RequestState
from foretoken.errors import EngineError, InputError, OverloadedError

_Command = Callable[[], None]


class Ticket:
    """One submitted answer: iterate over it for its pieces, `result()` for all of it, `cancel()` to leave it.

    Iterating raises the error of a request that failed.
    """

    def __init__(self, owner: AsyncEngine, params: SamplingParams) -> None:
        self._owner, self._params = owner, params
        self._pieces: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._listener: Callable[[], bool] | None = None
        self._listening = threading.Lock()
        self.state: RequestState | None = None  # set by the engine's thread

    def __iter__(self) -> Iterator[StepOutput]:
        try:
            while (piece := self._pieces.get()) is not None:
                yield _checked(piece)
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncGenerator[StepOutput]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        with self._listening:
            self._listener = lambda: _tell(loop, arrived)
        try:
            while True:
                arrived.clear()
                while not self._pieces.empty():
                    piece = self._pieces.get()
                    if piece is None:
                        return
                    yield _checked(piece)
                    arrived.set()  # look again before waiting: more may have come meanwhile
                await arrived.wait()
        finally:
            with self._listening:
                self._listener = None
            self.cancel()

    def result(self) -> GenerateOutput:
        """Wait for the whole answer; one that failed carries its `error`.

        Raises:
            InputError, CapacityError: the request could never run.
        """
        for _ in self._until_end():
            pass
        return self._output()

    async def wait(self) -> GenerateOutput:
        """`result` for coroutines; cancelling the task leaves the request."""
        try:
            async for _ in self:
                pass
        except Exception as error:
            if self.state is None or self.state.error is not error:
                raise
        return self._output()

    def cancel(self) -> None:
        """Leave the request; one that has ended is not changed."""
        if self.state is None or self.state.finish_reason is None:
            self._owner._command(lambda: self._owner._leave(self))

    def put(self, piece: StepOutput | Exception | None) -> None:
        """For the engine's thread: hand over a piece, an error, or None at the end."""
        self._pieces.put(piece)
        with self._listening:
            gone = self._listener is not None and not self._listener()
        if gone:
            self.cancel()

    def _until_end(self) -> Iterator[StepOutput]:
        while (piece := self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def _output(self) -> GenerateOutput:
        assert self.state is not None
        return collect([self.state], [1])[0]


def _tell(loop: asyncio.AbstractEventLoop, arrived: asyncio.Event) -> bool:
    """Wake a coroutine; False if its loop has ended without leaving the ticket."""
    try:
        loop.call_soon_threadsafe(arrived.set)
    except RuntimeError:
        return False
    return True


def _checked(piece: StepOutput | Exception) -> StepOutput:
    if isinstance(piece, Exception):
        raise piece
    if piece.error is not None:
        raise piece.error
    return piece


class AsyncEngine:
    """Owns `llm` while it is open: nobody else may use it. At most `max_waiting` requests wait for a place in the batch."""

    def __init__(self, llm: LLM, max_waiting: int = 256) -> None:
        check_limits(max_waiting=max_waiting)
        self.llm, self.max_waiting = llm, max_waiting
        self._tickets: dict[int, Ticket] = {}
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._loading = threading.Lock()
        self._unborn = 0  # submitted, not yet seen by the engine's thread
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="foretoken-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> Ticket:
        """Queue one answer; a drafter named for the first time is loaded in the caller's thread.

        Raises:
            InputError: a parameter that cannot be honoured. What only the engine can see comes with the first piece.
            OverloadedError: `max_waiting` requests wait already.
        """
        params, spec = params or SamplingParams(), spec or self.llm.spec
        (one,) = as_prompts([prompt])
        check_types(params, spec)
        if params.n > 1:
            raise InputError("n", params.n, "a ticket is one answer; use generate, or one ticket per answer")
        with self._loading:
            self.llm.prepare(spec)
        ticket = Ticket(self, params)
        with self._wake:
            if self._closing:
                raise InputError("engine", "closed", "was closed; open it again")
            if len(self.llm.engine.scheduler.waiting) + self._unborn >= self.max_waiting:
                raise OverloadedError(f"{self.max_waiting} requests wait already: come again later, or raise max_waiting")
            self._unborn += 1
        self._command(lambda: self._begin(ticket, one, params, spec))
        return ticket

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> AsyncIterator[StepOutput]:
        """What each step adds to one answer; leaving the iteration frees the request."""
        async with contextlib.aclosing(aiter(self.submit(prompt, params, spec))) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> GenerateOutput:
        """The whole answer to one prompt, all `n` of them."""
        params = params or SamplingParams()
        tickets: list[Ticket] = []
        try:
            for one in each_answer(params):
                tickets.append(self.submit(prompt, one, spec))
            first, *others = await asyncio.gather(*(ticket.wait() for ticket in tickets))
        finally:
            for ticket in tickets:  # those that have ended do not mind
                ticket.cancel()
        return replace(first, others=tuple(others))

    def close(self) -> None:
        """Stop after the step that runs now; requests that have not ended are aborted. Closing again does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _command(self, command: _Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            with self._wake:
                while not (self._commands or engine.has_work or self._closing):
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
                closing = self._closing
            for command in commands:
                command()
            if closing:
                break
            self._step()
        for ticket in list(self._tickets.values()):
            self._leave(ticket)

    def _step(self) -> None:
        engine = self.llm.engine
        try:
            outputs = self.llm.step()
        except Exception as error:  # noqa: BLE001 - whatever broke, those who wait for an answer must hear of it
            broken = EngineError(f"a step of the engine broke down: {type(error).__name__}: {error}")
            broken.__cause__ = error
            outputs = engine.fail_running(broken)
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue
            ticket.put(output)
            if output.finish_reason is not None:
                self._end(ticket)

    def _begin(self, ticket: Ticket, prompt: Prompt, params: SamplingParams, spec: SpecConfig) -> None:
        with self._wake:
            self._unborn -= 1
        try:
            ticket.state = self.llm.submit(prompt, params, spec)
        except Exception as error:  # noqa: BLE001 - belongs to who submitted
            ticket.put(error)
            ticket.put(None)
            return
        self._tickets[ticket.state.request_id] = ticket

    def _leave(self, ticket: Ticket) -> None:
        if ticket.state is not None and ticket.state.request_id in self._tickets:
            self.llm.engine.abort(ticket.state.request_id)
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        assert ticket.state is not None
        del self._tickets[ticket.state.request_id]
        ticket.put(None)
