"""The process of one engine: `python -m foretoken.server.life.worker FD`, started by `supervisor`.

It answers commands (`wire`) from the front over the inherited socket FD, and ends when that is closed: no worker
outlives its front. SIGINT and SIGTERM are the front's matter and ignored here, since a terminal and a service manager
send them to every process of the group. SIGUSR1 writes the stacks of all threads to standard error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from foretoken.backend.call import Backend, Generation
from foretoken.errors import ForetokenError
from foretoken.machine.process import give_back_freed_memory
from foretoken.server.life import wire
from foretoken.server.receiving import open_stream

if TYPE_CHECKING:
    from foretoken.backend.local import LocalBackend
    from foretoken.engine.async_engine import AsyncEngine

_log = logging.getLogger("foretoken.worker")

READ_BYTES = 4 << 20  # read ahead of the decoder; long prompts come in few pieces
_TRIM_S = 60.0  # after a step larger than any before its memory is given back within that
_CLOSING_S = 5.0  # for the running step to end; then the process ends without it


@dataclass(eq=False)
class _Running:
    """A command that is being answered; `generation` is None before a call was opened."""

    task: asyncio.Task[None]
    generation: Generation | None = None


async def value_of(command: Any, backend: Backend) -> Any:  # noqa: ANN401
    """What a command that generates nothing returns."""
    if isinstance(command, wire.Tokenize):
        return await backend.tokenize(command.request)
    if isinstance(command, wire.Spell):
        return await backend.spell(command.token_ids)
    if isinstance(command, wire.Detokenize):
        return await backend.detokenize(command.token_ids, command.has_specials)
    assert isinstance(command, wire.AskStats)
    return await backend.stats()


def refused(call: int, error: Exception) -> wire.Refused:
    """What a command that failed returns; an error that is not ours is logged."""
    if not isinstance(error, ForetokenError):  # without its message, which may hold a user's text
        where = "".join(traceback.format_tb(error.__traceback__))
        _log.warning("%s in a call:\n%s", type(error).__name__, where)
    return wire.Refused(call, wire.to_wire(error))


class Worker:
    """Answers commands of a front with the engine of this process."""

    def __init__(self, channel: wire.Channel, load: wire.LoadEngine) -> None:
        self._channel, self._load = channel, load
        self._running: dict[int, _Running] = {}
        self._backend: LocalBackend | None = None

    async def run(self) -> None:
        """Load, then answer commands until the front closes."""
        loading = asyncio.create_task(self._start())
        while (command := await self._channel.receive(self._refuse)) is not None:
            if isinstance(command, wire.Cancel):
                await self._cancel(command.call)
            else:
                task = asyncio.create_task(self._answer(command))
                self._running[command.call] = _Running(task)
                task.add_done_callback(partial(self._ended, command.call))
        if self._backend is None and not loading.done():
            self._end(0)  # no thread can be interrupted while it loads
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        if self._backend is not None:
            await self._close(self._backend.engine)

    def _refuse(self, call: int, why: str) -> None:
        """A command whose values have wrong types is refused alone."""
        self._channel.send(wire.Refused(call, wire.WireError("InputError", field="request", remedy=why)))

    async def _close(self, engine: AsyncEngine) -> None:
        timer = threading.Timer(_CLOSING_S, self._end, (0,))
        timer.daemon = True
        timer.start()
        for one in self._running.values():
            one.task.cancel()
        await asyncio.to_thread(engine.close)
        await asyncio.to_thread(engine.llm.close)
        timer.cancel()

    def _end(self, code: int) -> NoReturn:
        """End the process at once, whatever threads do."""
        sys.stderr.flush()
        os._exit(code)

    # ---- the engine

    async def _start(self) -> None:
        began = time.perf_counter()
        try:
            backend = self._backend = await asyncio.to_thread(self._build)
        except Exception as error:  # noqa: BLE001 - reported to the front
            if not isinstance(error, ForetokenError):
                traceback.print_exception(error)
            self._channel.send(wire.NotLoaded(wire.to_wire_of_loading(error)))
            self._channel.close()
            return
        engine = backend.engine
        drafters = tuple(sorted(engine.llm.spec.leaves))
        self._channel.send(wire.Loaded(backend.info, time.perf_counter() - began, drafters))
        trimmed_s = time.perf_counter()
        while engine.is_running:
            if time.perf_counter() - trimmed_s > _TRIM_S:
                await asyncio.to_thread(give_back_freed_memory)
                trimmed_s = time.perf_counter()
            began_s = engine.turn_began_s
            step_s = None if began_s is None else time.perf_counter() - began_s
            self._channel.send(wire.Beat(step_s))
            await asyncio.sleep(self._load.beat_s)
        _log.critical("the engine's thread has broken down: the worker ends")
        self._end(1)

    def _build(self) -> LocalBackend:
        """Build the engine, in a thread: importing torch and reading weights take seconds."""
        from foretoken.backend.local import LocalBackend, build_engine

        config = wire.engine_config_of(self._load.engine)
        engine, missing_draft = build_engine(config, self._load.max_waiting, self._load.draft_required)
        return LocalBackend(engine, self._load.name, missing_draft)

    # ---- commands

    async def _cancel(self, call: int) -> None:
        running = self._running.get(call)
        if running is None:
            return
        if running.generation is None:
            running.task.cancel()
        else:
            await running.generation.cancel()

    async def _answer(self, command: Any) -> None:  # noqa: ANN401 - a command with a call
        call = command.call
        try:
            if self._backend is None:
                raise AssertionError("the front asks before the engine is loaded")
            if isinstance(command, wire.Open):
                await self._generate(command, self._backend)
            else:
                ask = self._invariants if isinstance(command, wire.AskInvariants) else partial(value_of, command)
                self._channel.send(wire.Returned(call, await ask(self._backend)))
        except Exception as error:  # noqa: BLE001 - the error of this call; the others go on
            self._channel.send(refused(call, error))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        """A command was answered, or cancelled, perhaps before its task began."""
        del self._running[call]
        if task.cancelled():
            self._channel.send(wire.Over(call))

    async def _generate(self, command: wire.Open, backend: LocalBackend) -> None:
        generation = await backend.open(command.request)
        self._running[command.call].generation = generation
        async for event in generation:
            self._channel.send(wire.Happened(command.call, event))
            await self._channel.drained()
        self._channel.send(wire.Over(command.call))

    async def _invariants(self, backend: LocalBackend) -> dict[str, Any]:
        files = "/proc/self/fd"
        return {
            **(await backend.stats())["invariants"],
            "pid": os.getpid(),
            "num_calls": len(self._running) - 1,  # without this one
            "num_tasks": len(asyncio.all_tasks()),
            "num_threads": threading.active_count(),
            "num_files": len(os.listdir(files)) if os.path.isdir(files) else None,
        }


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _log.warning("%s", message)


async def _serve(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    reader, writer = await open_stream(READ_BYTES, sock=connection)
    channel = wire.Channel(reader, writer, wire.Command)
    load = await channel.receive()
    if isinstance(load, wire.LoadEngine):
        await Worker(channel, load).run()


def main() -> None:
    """Serve the front until it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    warnings.showwarning = _show_warning
    asyncio.run(_serve(int(sys.argv[1])))


if __name__ == "__main__":
    main()
