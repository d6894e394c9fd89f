"""Several workers behind one front, as one `Backend`; also how a single one is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from foretoken.backend.call import Call, State
from foretoken.backend.events import ModelInfo
from foretoken.engine_config import EngineConfig
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.server.life.announcements import Announcements
from foretoken.server.life.config import LifeConfig
from foretoken.server.life.merging import merged
from foretoken.server.life.quarantine import Quarantine, fingerprint_of
from foretoken.server.life.remote import BEING_RESTARTED, RemoteGeneration, RemoteService
from foretoken.server.life.routing import PrefixRouting
from foretoken.server.life.supervisor import SupervisedWorker

_WHY: Mapping[State, str] = {
    "loading": "the model is being loaded",
    "draining": "the server is shutting down",
    "restarting": "the engine is being restarted",
    "failed": "the engine could not be started",
}


class Replicas:
    """`Backend` over `config.workers` supervised workers with the same model. Each call runs in one of them.

    Everything happens in the event loop that called `start`; `close` ends the workers.
    """

    def __init__(self, engine: EngineConfig, name: str, config: LifeConfig, draft_required: bool = False) -> None:
        self.changes = Announcements()
        self._routing, self._quarantine = PrefixRouting(), Quarantine(config.quarantine_s)
        self._is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self.workers = [
            SupervisedWorker(number, engine, name, config, draft_required, self.changes.announce, self._note_death)
            for number in range(config.workers)
        ]

    def start(self) -> None:
        """Start the workers in the background."""
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers]

    @property
    def state(self) -> State:
        """See `Backend.state`: ready while any worker is."""
        if self._is_draining:
            return "draining"
        states = {worker.state for worker in self.workers}
        for state in ("ready", "loading", "restarting"):
            if state in states:
                return state
        return "failed"

    @property
    def info(self) -> ModelInfo | None:
        """See `Backend.info`."""
        return next((worker.info for worker in self.workers if worker.info is not None), None)

    @property
    def failure(self) -> ForetokenError | None:
        """Why no worker will ever be ready again; None while one may."""
        failures = [worker.failure for worker in self.workers]
        return failures[0] if all(failures) else None

    @property
    def num_open(self) -> int:
        """Commands in flight."""
        return sum(worker.service.num_open for worker in self.workers if worker.service is not None)

    async def open(self, call: Call) -> RemoteGeneration:
        """See `Backend.open`.

        Raises:
            InputError: the engine died twice while it answered this request.
            WorkerDiedError: the engine's process died meanwhile.
        """
        services = self._services()
        fingerprint = fingerprint_of(call)
        self._quarantine.check(fingerprint)
        number = self._routing.choose(call, {number: service.num_open for number, service in services.items()})
        return await services[number].open(call, fingerprint)

    async def tokenize(
        self, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """See `Backend.tokenize`."""
        return await self._least_loaded().tokenize(prompt, messages, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `Backend.detokenize`."""
        return await self._least_loaded().detokenize(token_ids)

    async def stats(self) -> dict[str, Any]:
        """See `Backend.stats`: sums over the workers, rates and shares recomputed (`merging`). Also `num_restarts`, and
        `replicas`: the statistics of each worker, `engine` naming its process.
        """
        pids = {worker.number: worker.pid for worker in self.workers}
        found = await self._of_each(lambda service: service.stats())
        restarts = sum(max(0, worker.num_starts - 1) for worker in self.workers)
        replicas = [{**stats, "engine": str(pids[number])} for number, stats in found.items()]
        return merged(list(found.values())) | {"num_restarts": restarts, "replicas": replicas}

    async def invariants(self) -> dict[str, Any]:
        """What every worker holds now, and what the front holds for them."""
        found = await self._of_each(lambda service: service.invariants())
        return {
            "state": self.state,
            "num_open": self.num_open,
            "num_tasks": len(asyncio.all_tasks()),
            "num_quarantined": len(self._quarantine),
            "workers": [
                {
                    "number": worker.number,
                    "state": worker.state,
                    "pid": worker.pid,
                    "num_starts": worker.num_starts,
                    **found.get(worker.number, {}),
                }
                for worker in self.workers
            ],
        }

    async def drain(self, drain_s: float) -> bool:
        """Take no more calls, and wait for those in flight for at most so long; whether all of them ended. The others
        end with an `UnavailableError`.
        """
        self._is_draining = True
        self.changes.announce()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self.num_open:
                    await asyncio.sleep(0.02)
        all_ended = not self.num_open
        for worker in self.workers:
            if worker.service is not None:
                worker.service.abandon("the server is shutting down")
        return all_ended

    async def close(self) -> None:
        """End the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill_now(self) -> None:
        """End the workers without waiting for anything, for a process that ends itself."""
        for worker in self.workers:
            worker.kill_now()

    def _services(self) -> dict[int, RemoteService]:
        """The workers that take calls.

        Raises:
            UnavailableError: there is none.
        """
        found = {
            worker.number: worker.service
            for worker in self.workers
            if worker.service is not None and worker.state == "ready" and not self._is_draining
        }
        there = {number: service for number, service in found.items() if not service.is_lost}
        if not there:
            raise UnavailableError(BEING_RESTARTED if found else _WHY.get(self.state, "the engine takes no requests"))
        return there

    def _least_loaded(self) -> RemoteService:
        return min(self._services().values(), key=lambda service: service.num_open)

    async def _of_each(self, ask: Callable[[RemoteService], Any]) -> dict[int, dict[str, Any]]:
        """What each worker says; one that dies meanwhile says nothing.

        Raises:
            UnavailableError: no worker says anything.
        """
        services = {worker.number: worker.service for worker in self.workers if worker.service is not None}
        found = await asyncio.gather(*map(ask, services.values()), return_exceptions=True)
        said = {number: one for number, one in zip(services, found, strict=True) if isinstance(one, dict)}
        if not said:
            raise UnavailableError(_WHY.get(self.state, "the engine takes no requests"))
        return said

    def _note_death(self, service: RemoteService) -> None:
        self._quarantine.died(service.fingerprints)
