"""One worker, supervised: started, asked for its canary, watched, and started again after it has died."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from foretoken.backend.call import State
from foretoken.backend.events import ModelInfo
from foretoken.backend.plain import plain
from foretoken.engine_config import EngineConfig
from foretoken.errors import EngineError, ForetokenError, WorkerDiedError
from foretoken.server.life.canary import CanaryAnswer, ask_canary, difference
from foretoken.server.life.config import LifeConfig
from foretoken.server.life.fault_hooks import is_test_build
from foretoken.server.life.remote import RemoteService
from foretoken.server.life.wire import ArmFaults, Beat, Loaded, LoadEngine, NotLoaded
from foretoken.server.life.wire_errors import from_wire
from foretoken.server.life.worker_process import WorkerProcess

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
        on_death: Callable[[RemoteService], None],
    ) -> None:
        self.number, self._config, self._name, self._draft_required = number, config, name, draft_required
        device = config.device_of(number)
        self._engine = engine if device is None else replace(engine, device=device)
        self._on_change, self._on_death = on_change, on_death
        self.state: State = "loading"
        self.info: ModelInfo | None = None
        self.drafters: tuple[str, ...] = ()
        self.load_s = 0.0
        self.service: RemoteService | None = None  # of a worker that is ready
        self.failure: ForetokenError | None = None
        self.num_starts = self.num_deaths = 0
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
            service = await self._load(process)
            if service is None:
                return None
            reading = asyncio.create_task(self._read(process, service))
            watching = asyncio.create_task(self._watch(process))
            try:
                if not await self._passes_canary(service):
                    return None
                process.channel.send(ArmFaults())
                self.service, ready_at = service, clock()
                _log.info("worker %d: ready, pid %d, loaded in %.1f s", self.number, process.pid, self.load_s)
                self._become("ready")
                await reading
            finally:
                watching.cancel()
        except asyncio.CancelledError:
            end = process.end  # the server ends: the worker may close its files
            raise
        finally:
            self._on_exit(ready_at is not None)
            if reading is not None:
                reading.cancel()
            code = await end()
            self._process = None
        _log.warning("worker %d: its process has ended with %d", self.number, code)
        return None if ready_at is None else clock() - ready_at

    async def _load(self, process: WorkerProcess) -> RemoteService | None:
        """Wait until the engine is loaded; None if it could not be."""
        is_first = self.num_starts == 1  # a fault on demand that came again could not be recovered from
        config = self._config
        process.channel.send(
            LoadEngine(
                engine=plain(self._engine),
                name=self._name,
                max_waiting=config.max_waiting,
                beat_s=config.beat_s,
                draft_required=self._draft_required,
                takes_faults=is_first and is_test_build(),
            )
        )
        message = await process.channel.receive()
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
        return RemoteService(process.channel, message.info, config.max_unread_events)

    async def _passes_canary(self, service: RemoteService) -> bool:
        try:
            answer = await ask_canary(service, service.info)
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

    async def _read(self, process: WorkerProcess, service: RemoteService) -> None:
        """Deliver what the worker sends, until it is gone."""
        clock = asyncio.get_running_loop().time
        try:
            while (message := await process.channel.receive()) is not None:
                if isinstance(message, Beat):
                    self._stuck.beat(message.step_s, clock())
                else:
                    service.take(message)
        except (EngineError, TypeError) as error:
            _log.warning("worker %d: %s", self.number, error)
        finally:
            self._on_death(service)
            service.fail(_death())

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

    def _on_exit(self, was_ready: bool) -> None:
        """The worker is gone, or has to go."""
        service, self.service = self.service, None
        self.num_deaths += was_ready
        self._become("restarting" if self.info is not None else "loading")
        if service is not None:
            service.fail(_death())


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


def _death() -> WorkerDiedError:
    return WorkerDiedError("the engine's process died; it is being restarted")
