"""`RemoteBackend`: the engine of a worker process, seen from the front."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from foretoken.backend.call import Call, Event, ModelInfo, State, TextToEncode
from foretoken.errors import ForetokenError, InputError, OverloadedError, UnavailableError
from foretoken.server.life import wire

BEING_RESTARTED = "the engine is being restarted"


class Sender(Protocol):
    """A way to a worker."""

    def send(self, message: wire.Command) -> None:
        """See `Channel.send`."""


class RemoteBackend:
    """`Backend` over a channel to a worker that has loaded its engine. Whoever reads the channel calls `take` with what
    comes, and `fail` once when the worker is gone.
    """

    def __init__(self, channel: Sender, info: ModelInfo, max_unread_events: int) -> None:
        self._channel, self.info, self._max_unread = channel, info, max_unread_events
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._death: ForetokenError | None = None

    @property
    def state(self) -> State:
        """See `Backend.state`; known before the supervisor notices that the worker is gone."""
        return "ready" if self._death is None else "restarting"

    @property
    def num_open(self) -> int:
        """Commands that are not answered to the end."""
        return len(self._pending)

    @property
    def fingerprints(self) -> list[bytes]:
        """Those of the calls in flight."""
        return [pending.fingerprint for pending in self._pending.values() if pending.fingerprint]

    async def open(self, call: Call, fingerprint: bytes = b"") -> RemoteGeneration:
        """See `Backend.open`. `fingerprint` is remembered while the call is in flight.

        Raises:
            WorkerDiedError: the engine's process died meanwhile.
        """
        number = next(self._numbers)
        pending = self._send(number, wire.Open(number, call))
        pending.fingerprint = fingerprint
        try:
            await pending.first
        except asyncio.CancelledError:
            self.leave(number)
            raise
        return RemoteGeneration(self, number, pending)

    async def tokenize(self, text: TextToEncode) -> list[int]:
        """See `Backend.tokenize`."""
        found: list[int] = await self._ask(lambda number: wire.Tokenize(number, text))
        return found

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        """See `Backend.spell`."""
        found: list[str | None] = await self._ask(lambda number: wire.Spell(number, list(token_ids)))
        return found

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        """See `Backend.detokenize`."""
        return str(await self._ask(lambda number: wire.Detokenize(number, list(token_ids), has_specials)))

    async def stats(self) -> dict[str, Any]:
        """See `Backend.stats`."""
        found: dict[str, Any] = await self._ask(wire.AskStats)
        return found

    async def invariants(self) -> dict[str, Any]:
        """What the worker holds now, see `wire.AskInvariants`."""
        found: dict[str, Any] = await self._ask(wire.AskInvariants)
        return found

    def take(self, message: wire.Message) -> None:
        """Deliver an event or an answer to whoever waits for it; what nobody waits for any more is dropped."""
        if not isinstance(message, wire.Happened | wire.Over | wire.Refused | wire.Returned):
            raise TypeError(f"{type(message).__name__} belongs to no call")
        pending = self._pending.get(message.call)
        if isinstance(message, wire.Happened):
            if pending is not None and not pending.put(message.event, self._max_unread):
                self.leave(message.call)
            return
        if pending is None:
            return
        del self._pending[message.call]
        if isinstance(message, wire.Returned):
            pending.end(None, message.value)
        else:
            pending.end(wire.from_wire(message.error) if isinstance(message, wire.Refused) else None)

    def leave(self, number: int) -> None:
        """Let the worker free a call; nothing more of it is taken."""
        if self._pending.pop(number, None) is not None:
            self._channel.send(wire.Cancel(number))

    def ask_to_stop(self, number: int) -> None:
        """Let the worker end a call; its last events are still taken."""
        if number in self._pending:
            self._channel.send(wire.Cancel(number))

    def fail(self, error: ForetokenError) -> None:
        """End everything in flight, and whatever is asked from now on, with `error`."""
        self._death = error
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.end(type(error)(str(error)))  # each reader raises its own

    def abandon(self, reason: str) -> None:
        """Leave everything in flight; its readers get an `UnavailableError`."""
        for number, pending in list(self._pending.items()):
            self.leave(number)
            pending.end(UnavailableError(reason))

    def _send(self, number: int, command: wire.Command) -> _Pending:
        if self._death is not None:
            raise UnavailableError(BEING_RESTARTED)
        try:
            self._channel.send(command)
        except (OverflowError, UnicodeEncodeError, TypeError, ValueError, RecursionError) as error:
            raise _unsendable(command, error) from error
        pending = self._pending[number] = _Pending()
        return pending

    async def _ask(self, command: Callable[[int], wire.Command]) -> Any:  # noqa: ANN401 - what the command returns
        number = next(self._numbers)
        pending = self._send(number, command(number))
        try:
            return await pending.first
        except asyncio.CancelledError:
            self.leave(number)
            raise


class RemoteGeneration:
    """A call that runs in a worker."""

    def __init__(self, backend: RemoteBackend, number: int, pending: _Pending) -> None:
        self._backend, self._number, self._pending = backend, number, pending

    async def __aiter__(self) -> AsyncGenerator[Event]:
        try:
            while True:
                event = await self._pending.next()
                if event is None:
                    return
                yield event
        finally:
            self._backend.leave(self._number)

    async def cancel(self) -> None:
        """See `Generation.cancel`."""
        self._backend.ask_to_stop(self._number)


class _Pending:
    """What came for one command and was not read yet. `first` is done with its answer, first event, or error."""

    def __init__(self) -> None:
        self.first: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.fingerprint = b""  # of a call
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._error: ForetokenError | None = None
        self._has_ended = False

    def put(self, event: Event, max_unread: int) -> bool:
        """Keep an event for the reader; False, and an error for the reader, if too many wait for it."""
        if len(self._events) >= max_unread:
            self.end(OverloadedError(f"{max_unread} events of the answer were not read: the call was cancelled"))
            return False
        self._events.append(event)
        self._arrived.set()
        if not self.first.done():
            self.first.set_result(None)
        return True

    def end(self, error: ForetokenError | None, value: object = None) -> None:
        """Nothing more comes. Only the first call counts."""
        if self._has_ended:
            return
        self._has_ended, self._error = True, error
        self._arrived.set()
        if self.first.done():
            return
        if error is None:
            self.first.set_result(value)
        else:
            self.first.set_exception(error)

    async def next(self) -> Event | None:
        """The next event; None at the end.

        Raises:
            ForetokenError: with which the call ended.
        """
        while not self._events:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


def _unsendable(command: wire.Command, error: Exception) -> InputError:
    """Names the field of a request that kept its command from being sent."""
    name, value = wire.unwritable(command.request if isinstance(command, wire.Open | wire.Tokenize) else command)
    if not name:
        return InputError("request", None, str(error))  # each part can be sent: together they are too long
    shown = value if isinstance(value, int) else None  # a text is the user's own, and what is nested may be long
    return InputError(name.removeprefix("params."), shown, "must be a number of at most 64 bits, or a Unicode text")
