"""The process of a worker, and the front's end of its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import foretoken
from foretoken.machine.threads import names_waiting, sleeping
from foretoken.server.life.wire import Channel, Message

_READ_BYTES = 4 << 20  # what may wait to be decoded: a step of many answers with log-probabilities
_DUMP_S = 0.5  # for the stacks of all threads to be written; nothing says when they are
_CLOSING_S = 10.0  # a worker that was asked to end, and did not, is killed


class WorkerProcess:
    """A running worker. It leads a process group of its own, so what it has started ends with it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process, self.channel = process, channel

    @classmethod
    async def start(cls) -> WorkerProcess:
        """Start a process that waits for its first command.

        Raises:
            OSError: the system has no room for one.
        """
        ours, theirs = socket.socketpair()
        try:
            command = [sys.executable, "-P", "-m", "foretoken.server.life.worker", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for results of the command
                start_new_session=True,
                env=worker_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
        except BaseException:  # such as a front that ends meanwhile: nobody else knows of the process
            ours.close()
            process.kill()
            process.wait()
            raise
        return cls(process, Channel(reader, writer, Message))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    async def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to standard error."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        await asyncio.sleep(_DUMP_S)

    async def end(self) -> int:
        """Let it end, kill what has not, and return its exit code (minus the number of the signal that ended it)."""
        self.channel.close()
        waiting = asyncio.to_thread(self._wait)
        return await waiting

    async def kill(self) -> int:
        """End it at once."""
        self._kill_group()
        return await self.end()

    def kill_now(self) -> None:
        """End it without waiting: for a front that ends itself."""
        self._kill_group()

    def _wait(self) -> int:
        try:
            code = self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._kill_group()
            code = self._process.wait()
        return code

    def _kill_group(self) -> None:
        if self._process.returncode is None:  # not waited for: the number is still its own
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this one's, with threads of OpenMP that sleep while they wait for each other.

    By default they spin, and keep the event loop of the worker, which hands out what a step emitted, from a core. It
    must be said before torch is imported; where the user said how they wait, that stands.
    """
    waiting = {} if names_waiting(os.environ) is not None else sleeping()
    return {**waiting, **os.environ, "PYTHONPATH": _import_path()}


def _import_path() -> str:
    """Where the worker finds this package, also where it was not installed; `-P` keeps the working folder out."""
    return os.pathsep.join(filter(None, [str(Path(foretoken.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
