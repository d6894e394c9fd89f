"""One worker, supervised: its process started, asked for its canary, watched, and started again after it has died.

The answer of the first start to the canary is the golden one. A later start that does not repeat it, text and
log-probabilities byte for byte, computes something else than before: a damaged file, a faulty device, other code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from foretoken.backend.call import AnswerEnded, AnswerFailed, Backend, Call, ModelInfo, Piece, State
from foretoken.config import SamplingParams, SpecConfig
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError, ForetokenError, WorkerDiedError
from foretoken.machine.process import import_path
from foretoken.machine.threads import names_waiting, sleeping
from foretoken.server.life.config import LifeConfig
from foretoken.server.life.remote import RemoteBackend
from foretoken.server.life.wire import Beat, Channel, Loaded, LoadEngine, Message, NotLoaded, from_wire, plain
from foretoken.server.receiving import open_stream

WORKER_COMMAND = (sys.executable, "-P", "-m", "foretoken.server.life.worker")
_READ_BYTES = 4 << 20  # what may wait to be decoded: a step of many answers with log-probabilities
_DUMP_S = 0.5  # for the stacks of all threads to be written; nothing says when they are
_CLOSING_S = 10.0  # a worker that was asked to end, and did not, is killed
_log = logging.getLogger("foretoken.server")


class SupervisedWorker:
    """The worker with this `number`, across restarts.

    `on_change` is called when `state` has changed, `on_death` before the calls in flight of a dead worker get their
    error. `failure` is why no worker is started any more. `drafters` are those that requests get by default.
    """

    def __init__(
        self,
        number: int,
        engine: EngineConfig,
        name: str,
        config: LifeConfig,
        draft_required: bool,
        on_change: Callable[[], None],
        on_death: Callable[[RemoteBackend], None],
    ) -> None:
        self.number, self._config, self._name, self._draft_required = number, config, name, draft_required
        device = config.device_of(number)
        self._engine = engine if device is None else replace(engine, device=device)
        self._on_change, self._on_death = on_change, on_death
        self.state: State = "loading"
        self.info: ModelInfo | None = None
        self.drafters: tuple[str, ...] = ()
        self.load_s = 0.0
        self.backend: RemoteBackend | None = None  # of a worker that is ready
        self.failure: ForetokenError | None = None
        self.num_starts = 0
        self._process: WorkerProcess | None = None
        self._golden: CanaryAnswer | None = None
        self._stuck = Watchdog(config.watchdog_s)

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep a worker alive until this is cancelled, or no start succeeds."""
        num_failed, pause_s = 0, self._config.first_restart_s
        while True:
            good_s: float | None = None
            try:
                good_s = await self._live()
            except Exception:  # noqa: BLE001 - such as no room for a process: a start that failed, not the end of all
                _log.exception("worker %d: could not be run", self.number)
            if good_s is None:
                num_failed += 1
                if self.failure is not None or num_failed >= self._config.failed_starts:
                    self._give_up(num_failed)
                    return
            else:
                num_failed = 0
                if good_s >= self._config.good_s:
                    pause_s = self._config.first_restart_s
            self._become("restarting" if self.info is not None else "loading")
            _log.warning("worker %d: starting again in %.1f s", self.number, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.longest_restart_s)

    def kill_now(self) -> None:
        """End the process without waiting for anything."""
        if self._process is not None:
            self._process.kill_now()

    def _become(self, state: State) -> None:
        if self.state != state:
            self.state = state
            self._on_change()

    def _give_up(self, num_failed: int) -> None:
        if self.failure is None:
            self.failure = EngineError(f"worker {self.number} could not be started {num_failed} times in a row")
        self._become("failed")

    # ---- one life

    async def _live(self) -> float | None:
        """Start a worker and stay with it until it is gone: seconds for which it was ready, None if it never was."""
        self.num_starts += 1
        process = self._process = await WorkerProcess.start()
        ready_at: float | None = None
        clock = asyncio.get_running_loop().time
        reading: asyncio.Task[None] | None = None
        end = process.kill
        try:
            backend = await self._load(process)
            if backend is None:
                return None
            reading = asyncio.create_task(self._read(process, backend))
            watching = asyncio.create_task(self._watch(process))
            try:
                if not await self._passes_canary(backend):
                    return None
                self.backend, ready_at = backend, clock()
                _log.info("worker %d: ready, pid %d, loaded in %.1f s", self.number, process.pid, self.load_s)
                self._become("ready")
                await reading
            finally:
                watching.cancel()
        except asyncio.CancelledError:
            end = process.end  # the server ends: the worker may close its files
            raise
        finally:
            self._on_exit()
            if reading is not None:
                reading.cancel()
            code = await end()
            self._process = None
        _log.warning("worker %d: its process has ended with %d", self.number, code)
        return None if ready_at is None else clock() - ready_at

    async def _load(self, process: WorkerProcess) -> RemoteBackend | None:
        """Wait until the engine is loaded; None if it could not be."""
        config = self._config
        process.channel.send(
            LoadEngine(
                engine=plain(self._engine),
                name=self._name,
                max_waiting=config.max_waiting,
                beat_s=config.beat_s,
                draft_required=self._draft_required,
            )
        )
        telling = asyncio.create_task(self._tell_loading(process))
        try:
            message = await process.channel.receive()
        finally:
            telling.cancel()
        if isinstance(message, NotLoaded):
            error = from_wire(message.error)
            if self.info is None:
                self.failure = error  # what could not be loaded once will not be the second time
            else:
                _log.warning("worker %d: %s", self.number, error)
            return None
        if not isinstance(message, Loaded):
            _log.warning("worker %d: died while it loaded", self.number)
            return None
        self.info, self.load_s, self.drafters = message.info, message.load_s, message.drafters
        return RemoteBackend(process.channel, message.info, config.max_unread_events)

    async def _tell_loading(self, process: WorkerProcess) -> None:
        """Say now and then that a worker still loads. Only its operator can tell a slow load from one that hangs."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            await asyncio.sleep(self._config.watchdog_s)
            _log.warning(
                "worker %d: still loading after %.0f s; `kill -USR1 %d` has it write its stacks to standard error",
                self.number,
                clock() - began,
                process.pid,
            )

    async def _passes_canary(self, backend: RemoteBackend) -> bool:
        try:
            answer = await ask_canary(backend, backend.info)
        except ForetokenError as error:
            answer = str(error)
        if isinstance(answer, str):
            _log.warning("worker %d: no answer to the canary request: %s", self.number, answer)
            return False
        if self._golden is None:
            self._golden = answer
        wrong = difference(self._golden, answer)
        if wrong:
            _log.critical(
                "worker %d: its answer to the canary request is not that of the first start (%s); it takes no "
                "requests. Are the model's files, the device and its driver the same?",
                self.number,
                wrong,
            )
        return not wrong

    async def _read(self, process: WorkerProcess, backend: RemoteBackend) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while (message := await process.channel.receive()) is not None:
                if isinstance(message, Beat):
                    self._stuck.beat(message.step_s, clock())
                else:
                    backend.take(message)
        except (EngineError, TypeError) as error:
            _log.warning("worker %d: %s", self.number, error)
        finally:
            self._on_death(backend)
            backend.fail(_death())

    async def _watch(self, process: WorkerProcess) -> None:
        """Kill a worker that is stuck."""
        clock = asyncio.get_running_loop().time
        self._stuck.beat(None, clock())
        while True:
            await asyncio.sleep(self._config.beat_s)
            why = self._stuck.reason(clock())
            if why:
                break
        _log.critical("worker %d: %s; its stacks follow, then it is killed", self.number, why)
        self._become("restarting")
        await process.dump_stacks()
        process.kill_now()

    def _on_exit(self) -> None:
        """The worker is gone, or has to go."""
        backend, self.backend = self.backend, None
        self._become("restarting" if self.info is not None else "loading")
        if backend is not None:
            backend.fail(_death())


def _death() -> WorkerDiedError:
    return WorkerDiedError("the engine's process died; it is being restarted")


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
            process = subprocess.Popen(
                (*WORKER_COMMAND, str(theirs.fileno())),
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
            reader, writer = await open_stream(_READ_BYTES, sock=ours)
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
        return await asyncio.to_thread(self._wait)

    async def kill(self) -> int:
        """End it at once."""
        self.kill_now()
        return await self.end()

    def _wait(self) -> int:
        try:
            return self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self.kill_now()
            return self._process.wait()

    def kill_now(self) -> None:
        """End it without waiting: for a front that ends itself."""
        if self._process.returncode is None:  # not waited for: the number is still its own
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this one's, with threads of OpenMP that sleep while they wait for each other.

    By default they spin, and keep the event loop of the worker, which hands out what a step emitted, from a core. It
    must be said before torch is imported; where the user said how they wait, that stands.
    """
    waiting = {} if names_waiting(os.environ) is not None else sleeping()
    return {**waiting, **os.environ, "PYTHONPATH": import_path()}


_TEXT = "def add(first, second):\n    return first"
_MAX_TOKENS = 12
_TENANT = "foretoken-canary"  # its cached prefix is nobody else's


class CanaryAnswer(msgspec.Struct, frozen=True):
    """What a worker answered; `logprobs` in hexadecimal, which rounds nothing."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]


def canary_call(info: ModelInfo) -> Call:
    """The request: greedy, plain decoding, so that only weights and arithmetic decide."""
    params = SamplingParams(max_tokens=_MAX_TOKENS, logprobs=0, ignore_eos=True, tenant=_TENANT)
    prompt = _TEXT if info.has_tokenizer else [number % info.vocab_size for number in range(1, 9)]
    return Call(params, [prompt], spec=SpecConfig())


async def ask_canary(backend: Backend, info: ModelInfo) -> CanaryAnswer | str:
    """The answer of a worker, or why there is none.

    Raises:
        ForetokenError: the worker refuses, or dies.
    """
    token_ids: list[int] = []
    logprobs: list[str] = []
    text, failure = "", "the answer did not end"
    async for event in await backend.open(canary_call(info)):
        if isinstance(event, Piece):
            token_ids += [token.token_id for token in event.tokens]
            logprobs += ["" if token.logprob is None else token.logprob.hex() for token in event.tokens]
        elif isinstance(event, AnswerFailed):
            failure = f"{event.error}: {event.message}"
        elif isinstance(event, AnswerEnded):
            text, failure = event.text, ""
    return failure or CanaryAnswer(text, tuple(token_ids), tuple(logprobs))


def difference(golden: CanaryAnswer, found: CanaryAnswer) -> str:
    """Where two answers differ; "" where they do not."""
    if golden == found:
        return ""
    if golden.token_ids != found.token_ids:
        pairs = enumerate(zip(golden.token_ids, found.token_ids, strict=False))
        place = next((number for number, (one, other) in pairs if one != other), "the end")
        return f"other tokens, from {place} on"
    return "other text" if golden.text != found.text else "the same tokens with other log-probabilities"


class Watchdog:
    """Whether a worker is stuck, from its signs of life: how long its running step has lasted when it was sent."""

    def __init__(self, watchdog_s: float) -> None:
        self._watchdog_s = watchdog_s
        self._step_s: float | None = None
        self._beaten_s = 0.0

    def beat(self, step_s: float | None, now_s: float) -> None:
        """A sign of life."""
        self._step_s, self._beaten_s = step_s, now_s

    def reason(self, now_s: float) -> str:
        """Why the worker counts as stuck; "" while it does not."""
        silent_s = now_s - self._beaten_s
        if silent_s > self._watchdog_s:
            return f"no sign of life for {silent_s:.1f} s"
        if self._step_s is not None and self._step_s + silent_s > self._watchdog_s:
            return f"a step has lasted {self._step_s + silent_s:.1f} s"
        return ""
