"""Workers without a process: the worker's end of the socket served in the same event loop, its engine a stand-in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from foretoken import SpecConfig
from foretoken.backend.call import AnswerEnded, Begun, Call, Event, ModelInfo, Piece, TextToEncode, TokenEvent
from foretoken.errors import InputError
from foretoken.server.life.wire import Channel, Command, LoadEngine, Message, builtin
from foretoken.server.life.worker import Worker

INFO = ModelInfo("stand-in", 100, 50, (0,), None, None, None, False, False, SpecConfig(), 4)


def crossed(value: object, kind: Any = Any) -> Any:
    """What arrives at the other end of a channel that reads messages of `kind`."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=builtin), type=kind)


async def channels() -> tuple[Channel, Channel]:
    """The front's end and the worker's end of one connection."""
    ends, opened = socket.socketpair(), list[Channel]()
    try:
        for end, kind in zip(ends, (Message, Command), strict=True):
            opened.append(Channel(*await asyncio.open_connection(sock=end), kind))
    except BaseException:  # a test may cancel the start
        for channel in opened:
            channel.close()
        for end in ends[len(opened) :]:
            end.close()
        raise
    front, worker = opened
    return front, worker


@dataclass
class ScriptedGeneration:
    """Emits one token after another; `hold` stops it after the first until it is cancelled."""

    token_ids: Sequence[int]
    hold: bool
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Begun(((1, 2),))
        for token_id in self.token_ids:
            yield Piece(0, "", (TokenEvent(token_id, "", None, "plain", logprob=-1.5),))
            if self.hold:
                await self.cancelled.wait()
                break
        reason = "abort" if self.cancelled.is_set() else "stop"
        yield AnswerEnded(0, reason, "", len(self.token_ids), {})

    async def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class ScriptedBackend:
    """Stands in for `LocalBackend`: answers every call with `token_ids`; those of tenant "hold" wait for a cancel."""

    token_ids: Sequence[int] = (3, 4)
    calls: list[Call] = field(default_factory=list)
    info: ModelInfo = INFO

    def __post_init__(self) -> None:
        self.engine = SimpleNamespace(
            is_running=True,
            turn_began_s=None,
            close=lambda: None,
            llm=SimpleNamespace(
                spec=SimpleNamespace(leaves=("ngram",)),
                close=lambda: None,
            ),
        )

    async def open(self, call: Call) -> ScriptedGeneration:
        self.calls.append(call)
        if call.params.tenant == "refuse":
            raise InputError("prompt", "a text of a user", "cannot be honoured")
        return ScriptedGeneration(self.token_ids, call.params.tenant == "hold")

    async def tokenize(self, text: TextToEncode) -> list[int]:
        return [len(text.prompt or "")]

    async def spell(self, token_ids: Sequence[int]) -> list[str | None]:
        return list(map(str, token_ids))

    async def detokenize(self, token_ids: Sequence[int], has_specials: bool = False) -> str:
        return " ".join(map(str, token_ids))

    async def stats(self) -> dict[str, Any]:
        return {"num_drafted": 4, "num_accepted": 2, "acceptance_rate": 0.5, "invariants": {"num_running": 0}}


class WorkerHere(Worker):
    """A worker whose engine is `backend`, or whose start fails with what `backend` raises."""

    def __init__(self, channel: Channel, load: LoadEngine, make: Callable[[], Any]) -> None:
        super().__init__(channel, load)
        self._make = make

    def _build(self) -> Any:
        return self._make()


class ProcessHere:
    """Stands in for `WorkerProcess`: a task instead of a process. `makers` give the engine of each start in turn;
    without any, the worker loads its own.
    """

    makers: Sequence[Callable[[], Any]] = ()
    started: list[ProcessHere]

    def __init__(self, channel: Channel, task: asyncio.Task[None], theirs: Channel) -> None:
        self.channel, self.task, self._theirs = channel, task, theirs
        self.pid, self.num_dumps = 0, 0

    @classmethod
    async def start(cls) -> ProcessHere:
        front, theirs = await channels()
        number = len(cls.started)
        make = cls.makers[min(number, len(cls.makers) - 1)] if cls.makers else None

        async def serve() -> None:
            load = await theirs.receive()
            await (Worker(theirs, load) if make is None else WorkerHere(theirs, load, make)).run()

        process = cls(front, asyncio.create_task(serve()), theirs)
        process.pid = number
        cls.started.append(process)
        return process

    async def dump_stacks(self) -> None:
        self.num_dumps += 1

    async def end(self) -> int:
        self.channel.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._theirs.close()
        return 0

    async def kill(self) -> int:
        self.kill_now()
        await self.end()
        return -9

    def kill_now(self) -> None:
        self.task.cancel()
        self._theirs.close()
