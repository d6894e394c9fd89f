"""One thread runs the engine, any number of threads and coroutines submit to it.

A request is prepared (its drafters loaded, its prompt tokenised, its grammar compiled) in the thread that submits it;
for coroutines a few worker threads do that, so neither their event loop nor the engine's thread waits for it. A
prepared request goes through a queue of commands that the engine's thread empties between two steps, and what a step
emitted comes back through the request's ticket. Cancelling a ticket, or closing a stream, frees everything that the
request held before the next step begins.

Every ticket ends. A command is queued under the same lock under which the thread takes its last ones, so a request is
either refused or seen; what the thread has not ended when it stops, for whatever reason, it ends then.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch

from foretoken.config import SamplingParams, SpecConfig
from foretoken.core import StepOutput
from foretoken.engine.admission import UNQUEUED, check_types
from foretoken.engine.driver import END_S, Driver
from foretoken.engine.llm import LLM
from foretoken.engine.preparing import PreparingThreads
from foretoken.engine.prompts import Conversation, Prompt, as_prompt, as_prompts
from foretoken.engine.recovery import engine_error
from foretoken.engine.request import GenerateOutput, PreparedRequest, RequestState, answer_of
from foretoken.engine.ticket import Ticket
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError, InputError, OverloadedError, RankError
from foretoken.machine.process import Uncopied, check_not_forked
from foretoken.params import check_limits

_Command = Callable[[Driver], None]
_Result = TypeVar("_Result")
_P = ParamSpec("_P")

# Worker threads that prepare the requests of coroutines. Preparing is mostly tokenising, which is short; a few threads
# keep one long grammar from holding up the others, and more would only take time from the engine's own thread.
_NUM_PREPARING = 4


class AsyncEngine(Uncopied):
    """Owns an `LLM` while it is open: nobody else may run requests there. At most `max_waiting` requests wait for a
    place in the batch, those included that are being prepared. `llm` may be an `EngineConfig`: then the `LLM` is built
    from it here, and closed with this.

    Raises:
        InputError: `llm` was closed, answers requests, or has an owner already; see also `LLM`.
        StorageError, ModelError: see `LLM`.
    """

    copy_remedy = "give the other process the EngineConfig, AsyncEngine.llm.config, and open one from it there"

    def __init__(self, llm: LLM | EngineConfig, max_waiting: int = 256) -> None:
        if not isinstance(llm, LLM | EngineConfig):
            raise InputError("llm", llm, "give an LLM or an EngineConfig")
        check_limits(max_waiting=max_waiting)
        self._owns_llm = isinstance(llm, EngineConfig)
        self.llm, self.max_waiting = LLM(llm) if isinstance(llm, EngineConfig) else llm, max_waiting
        # Of all tickets that have not ended: what was prepared, then its state once the engine's thread has queued it.
        self._requests: dict[Ticket, PreparedRequest] = {}
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._num_coming = 0  # being prepared, or prepared and not yet seen by the engine's thread
        self._is_closing = False
        self.turn_began_s: float | None = None  # on `time.perf_counter`; None while the thread waits: for watchdogs
        self._cause: BaseException | None = None  # why the thread ended, where nobody closed
        self._process = os.getpid()
        self._preparing = PreparingThreads(_NUM_PREPARING)
        # New threads begin with the number of torch's threads that was set last, which a step of another engine may
        # have lowered for as long as it runs: the threads of this one begin with the caller's.
        num_threads = torch.get_num_threads()
        self._loading = ThreadPoolExecutor(  # of drafters, which takes seconds
            1, "foretoken-load", initializer=torch.set_num_threads, initargs=(num_threads,)
        )
        driver, run = self.llm.claim(self), self._run
        self._thread = threading.Thread(target=run, args=(driver, num_threads), name="foretoken-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            driver.disclaim()
            if self._owns_llm:
                self.llm.close()
            raise
        _running.add(self)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None) -> Ticket:
        """Prepare one answer in this thread and queue it; coroutines have `submit_async`.

        Raises:
            InputError, ContextLengthError, CapacityError: the request can never run, or this was closed.
            ModelError, StorageError: its drafter cannot be loaded.
            OverloadedError: `max_waiting` requests wait already.
            EngineError: the engine's thread has broken down.
        """
        one = as_prompt(prompt)
        params, spec = self._checked(params, spec, is_single=True)
        with self._place(1):
            prepared = self.llm.prepare_request(one, params, spec)
            return self._enqueue([prepared])[0]

    async def submit_async(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> Ticket:
        """`submit` for coroutines: worker threads prepare the answer, so the event loop goes on meanwhile."""
        tickets = await self._submit_all([as_prompt(prompt)], *self._checked(params, spec, is_single=True))
        return tickets[0]

    async def submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        spec: SpecConfig | None = None,
        arrived_s: float | None = None,
    ) -> list[Ticket]:
        """`submit_async` for all `n` answers to each of several prompts, given as to `LLM.generate`: all are queued, or
        none. They came at `arrived_s`, on the clock of `time.perf_counter`, or else now.
        """
        texts = as_prompts(prompts)
        return await self._submit_all(texts, *self._checked(params, spec), arrived_s)

    async def in_thread(self, call: Callable[[], _Result], tenant: str = "") -> _Result:
        """What `call` returns, run in one of the threads that prepare requests of a tenant: tokenising, chat templates;
        an `InputError` or `EngineError` where this was closed or has broken down.
        """
        self.check_process()
        self._check_open()
        return await self._done(self._preparing.submit, tenant, call)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> AsyncIterator[StepOutput]:
        """What each step adds to one answer; leaving the iteration frees the request.

        Raises:
            InputError: this was closed half-way; also as `submit`.
            ForetokenError: the error of a request that failed.
        """
        ticket = await self.submit_async(prompt, params, spec)
        async with contextlib.aclosing(aiter(ticket)) as pieces:
            async for piece in pieces:
                yield piece
        if ticket.result().finish_reason == "abort":
            self._check_open()  # what came is not the whole answer

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, spec: SpecConfig | None = None
    ) -> GenerateOutput:
        """The whole answer to one prompt, all `n` of them."""
        tickets = await self._submit_all([as_prompt(prompt)], *self._checked(params, spec))
        try:
            first, *others = await asyncio.gather(*(ticket.wait() for ticket in tickets))
        finally:
            for ticket in tickets:  # without effect on those that have ended
                ticket.cancel()
        return replace(first, others=tuple(others))

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        spec: SpecConfig | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> GenerateOutput:
        """The next message of a conversation, see `LLM.chat`; a worker thread lays it out and tokenises it."""
        tenant = "" if params is None else params.tenant
        prompt = await self.in_thread(lambda: self.llm.encode_chat(messages, tools, must_fit=True), tenant)
        return await self.generate(prompt, params, spec)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel the request of a ticket, from any thread; one that has ended is not changed."""
        with self._wake:
            if ticket in self._requests:
                self._commands.append(partial(self._drop, ticket, None))
                self._wake.notify()

    def close(self) -> None:
        """Stop after the step that runs now; requests that have not ended are aborted. Closing again does nothing. Any
        thread may close; the engine's own (a watcher) does not wait for itself.
        """
        self._ask_to_stop()
        if os.getpid() != self._process:
            return
        self._preparing.shutdown()  # what is being prepared is refused when it wants to be queued
        self._loading.shutdown(wait=False)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self._owns_llm:
                self.llm.close()

    def end_thread(self) -> None:
        """Stop as `close` does, and wait for the thread for a limited time: for the exit of the interpreter."""
        if os.getpid() == self._process:
            self._ask_to_stop()
            self._thread.join(END_S)

    def _ask_to_stop(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread runs, and the target with it: until this is closed, or breaks down."""
        return self._thread.is_alive() and not self.llm.has_failed

    def check_process(self) -> None:
        """Refuse with an `InputError` in a fork of the process that opened this: it has no engine thread."""
        check_not_forked("engine", self._process)

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._cause is not None:
            raise engine_error("the engine's thread has broken down, open a new AsyncEngine", self._cause)
        if self._is_closing:
            raise InputError("engine", "closed", "was closed; open it again")

    # ---- how requests get to the engine's thread

    def _checked(
        self, params: SamplingParams | None, spec: SpecConfig | None, is_single: bool = False
    ) -> tuple[SamplingParams, SpecConfig]:
        """The arguments of a call, with their defaults and of the right kind; `is_single`: for one ticket."""
        self.check_process()
        params, spec = SamplingParams() if params is None else params, self.llm.spec if spec is None else spec
        check_types(params, spec)
        self._check_open()
        if is_single and params.n > 1:
            raise InputError("n", params.n, "a ticket is one answer; use generate, or one ticket per answer")
        return params, spec

    @contextlib.contextmanager
    def _place(self, count: int) -> Iterator[None]:
        """Hold places in the queue for `count` requests while they are prepared; `_enqueue` hands them on."""
        if count > self.max_waiting:
            remedy = f"prompts times n must be at most {self.max_waiting}; ask for fewer, or raise max_waiting"
            raise InputError("n", count, remedy)
        with self._wake:
            self._check_open()
            if len(self.llm.engine.scheduler.waiting) + self._num_coming + count > self.max_waiting:
                message = f"{self.max_waiting} requests wait already: come again later, or raise max_waiting"
                raise OverloadedError(message)
            self._num_coming += count
        try:
            yield
        except BaseException:
            with self._wake:
                self._num_coming -= count
            raise

    async def _submit_all(
        self, prompts: Sequence[Prompt], params: SamplingParams, spec: SpecConfig, arrived_s: float | None = None
    ) -> list[Ticket]:
        """Queue all `n` answers to each prompt, prepared in worker threads; without `arrived_s` they come now."""
        came_s = time.perf_counter() if arrived_s is None else arrived_s
        with self._place(params.n * len(prompts)):
            used = spec.for_request(params.prediction)
            if not self.llm.has_drafters(used):
                await self._done(self._loading.submit, self.llm.prepare, used)

            def prepare() -> list[PreparedRequest]:
                return [one for prompt in prompts for one in self.llm.prepare_requests(prompt, params, spec, came_s)]

            return self._enqueue(await self._done(self._preparing.submit, params.tenant, prepare))

    async def _done(self, submit: Callable[_P, Future[_Result]], *args: _P.args, **named: _P.kwargs) -> _Result:
        """What a thread makes of a job that is given to it now."""
        try:
            future = submit(*args, **named)
        except RuntimeError:  # closed just now
            self._check_open()
            raise
        return await asyncio.wrap_future(future)

    def _enqueue(self, prepared: Sequence[PreparedRequest]) -> list[Ticket]:
        """Issue a ticket for each and let the engine's thread begin them, unless it has ended while they were prepared;
        their places are held already.
        """
        tickets = [Ticket(self) for _ in prepared]
        with self._wake:
            self._check_open()
            self._requests.update(zip(tickets, prepared, strict=True))
            self._commands += [partial(self._begin, ticket) for ticket in tickets]
            self._wake.notify()
        return tickets

    # ---- the engine's thread

    def _run(self, driver: Driver, num_threads: int) -> None:
        cause: BaseException | None = None
        try:
            torch.set_num_threads(num_threads)
            while self._turn(driver):
                pass
        except BaseException as error:  # noqa: BLE001 - all tickets must end with this thread
            cause = error
        with self._wake:  # from here on nothing is queued
            self._is_closing, self._cause = True, cause
            self._commands.clear()
        broken = None if cause is None else engine_error("the engine's thread has broken down", cause)
        for ticket in list(self._requests):
            self._drop(ticket, broken, driver)
        driver.disclaim()

    def _turn(self, driver: Driver) -> bool:
        """What was asked for since the last step, then a step; False when it is time to stop."""
        with self._wake:
            while not (self._commands or driver.engine.has_work or self._is_closing):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
            is_closing = self._is_closing
            self.turn_began_s = time.perf_counter()
        for command in commands:
            command(driver)
        if is_closing:
            return False
        if driver.engine.has_work:
            self._step(driver)
        self.turn_began_s = None
        return True

    def _step(self, driver: Driver) -> None:
        try:
            driver.step(self)
        except RankError:
            raise  # no request can go on: the thread ends
        except Exception as error:  # noqa: BLE001 - requests that wait go on
            broken = engine_error("the engine could not recover from a step that broke down", error)
            with self._wake:
                begun = [ticket for ticket, one in self._requests.items() if isinstance(one, RequestState)]
            for ticket in begun:
                self._drop(ticket, broken, driver)

    def _receive(self, ticket: Ticket, output: StepOutput) -> None:
        if output.error is None:
            ticket.put(output)
        if output.finish_reason is not None:
            self._end(ticket, output.error)

    def _begin(self, ticket: Ticket, driver: Driver) -> None:
        with self._wake:
            self._num_coming -= 1
        if (prepared := self._requests.get(ticket)) is None:
            return  # cancelled before
        try:
            state = driver.enqueue(prepared, partial(self._receive, ticket), self)
        except Exception as error:  # noqa: BLE001 - the error of this ticket
            self._end(ticket, error)
        else:
            self._requests[ticket], ticket.request_id = state, state.request_id

    def _drop(self, ticket: Ticket, error: EngineError | None, driver: Driver) -> None:
        """End a ticket, if it has not ended: cancelled, closed, or broken by `error`."""
        state = self._requests.get(ticket)
        if state is None:
            return
        if isinstance(state, RequestState):
            try:
                driver.leave([state])
            except Exception as broken:  # noqa: BLE001 - its ticket must end
                error = error or engine_error("the request could not be aborted", broken)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, error: Exception | None) -> None:
        one = self._requests.pop(ticket)
        if not isinstance(one, RequestState):
            ticket.end(None if error is not None else answer_of(one.state(UNQUEUED)), error)
            return
        answer = answer_of(one)
        ticket.end(answer if error is None else replace(answer, finish_reason="error", error=error), error)


_running: WeakSet[AsyncEngine] = WeakSet()


@atexit.register
def _end_threads() -> None:
    """See `driver`, whose function runs after this one: a thread that waits for its turn could not be joined."""
    for engine in tuple(_running):
        engine.end_thread()
