"""One submitted answer, seen from outside the engine's thread: its pieces as they come, and all of it at the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING

from foretoken.core import StepOutput
from foretoken.engine.request import GenerateOutput
from foretoken.machine.process import Uncopied

if TYPE_CHECKING:
    from foretoken.engine.async_engine import AsyncEngine


class Ticket(Uncopied):
    """One submitted answer: iterate over it for its pieces, call `result()` for all of it or `cancel()` to abort it.

    The ticket keeps all pieces: every iteration, in any thread or coroutine and at any time, yields all of them from
    the first one on, and ends with the error of a request that failed. `result` and `wait` may be called several times.
    Leaving an iteration or a `wait` before its end cancels the request, unless another reader remains.
    """

    copy_remedy = "send the answer, Ticket.result(), when it has ended"

    def __init__(self, issuer: AsyncEngine) -> None:
        self._issuer = issuer
        self.request_id: int | None = None  # once the engine has begun it; None for one that was refused
        self._changed = threading.Condition()
        self._pieces: list[StepOutput] = []
        self._answer: GenerateOutput | None = None
        self._error: Exception | None = None
        self._has_ended = False
        self._num_readers = 0
        self._listeners: list[Callable[[], bool]] = []  # of coroutines; False from one whose loop is gone

    def __iter__(self) -> Iterator[StepOutput]:
        self._arrive()
        num_seen = 0
        try:
            while True:
                with self._changed:
                    while not self._has_ended and num_seen == len(self._pieces):
                        self._changed.wait()
                    pieces, has_ended = self._pieces[num_seen:], self._has_ended
                num_seen += len(pieces)
                yield from pieces
                if has_ended:
                    break
        finally:
            self._depart()
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncGenerator[StepOutput]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> bool:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop has ended without leaving the ticket
                return False
            return True

        self._arrive(tell)
        num_seen = 0
        try:
            while True:
                arrived.clear()
                with self._changed:
                    pieces, has_ended = self._pieces[num_seen:], self._has_ended
                num_seen += len(pieces)
                for piece in pieces:
                    yield piece
                if has_ended:
                    break
                if not pieces:
                    await arrived.wait()
        finally:
            self._depart(tell)
        if self._error is not None:
            raise self._error

    def result(self) -> GenerateOutput:
        """Wait for the whole answer; one that failed carries its `error`, one that was left ends with "abort".

        It blocks the thread: coroutines have `wait`.

        Raises:
            InputError, CapacityError: the request could never run.
            EngineError: the engine broke down before the request began.
        """
        self._arrive()
        try:
            with self._changed:
                while not self._has_ended:
                    self._changed.wait()
        finally:
            with self._changed:
                self._num_readers -= 1
        return self._outcome()

    async def wait(self) -> GenerateOutput:
        """`result` for coroutines; cancelling the task cancels the request."""
        try:
            async for _ in self:
                pass
        except Exception as error:
            if error is not self._error:
                raise
        return self._outcome()

    def cancel(self) -> None:
        """Cancel the request; one that has ended is not changed."""
        if not self._has_ended:
            self._issuer.cancel(self)

    # ---- for the engine's thread

    def put(self, piece: StepOutput) -> None:
        """Append a piece of the answer."""
        self._tell(lambda: self._pieces.append(piece))

    def end(self, answer: GenerateOutput | None, error: Exception | None = None) -> None:
        """Set the whole answer, or None and the error of a request that was refused. Only the first call counts."""

        def close() -> None:
            if not self._has_ended:
                self._answer, self._error, self._has_ended = answer, error, True

        self._tell(close)

    def _tell(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            if not listener():
                self._depart(listener)

    def _arrive(self, listener: Callable[[], bool] | None = None) -> None:
        if not self._has_ended:
            self._issuer.check_process()
        with self._changed:
            self._num_readers += 1
            if listener is not None:
                self._listeners.append(listener)

    def _depart(self, listener: Callable[[], bool] | None = None) -> None:
        """Stop reading; the last one who does so before the end leaves the request."""
        with self._changed:
            if listener is not None:
                if listener not in self._listeners:
                    return
                self._listeners.remove(listener)
            self._num_readers -= 1
            is_left = not self._num_readers and not self._has_ended
        if is_left:
            self._issuer.cancel(self)

    def _outcome(self) -> GenerateOutput:
        if self._answer is None:
            assert self._error is not None
            raise self._error
        return self._answer
