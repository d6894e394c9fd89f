"""`foretoken` whose server's first worker has a fault: `load:1:hang`, `step:30:hang`, `step:every-50:raise`.

`python -m tests.helpers.faulty_worker serve ...` is the command; `FORETOKEN_TEST_WORKER_FAULT` has the fault,
`point:nth:action`. `nth` is a number, or `every-N`: then each Nth passage acts. Points are `load`, starts of an engine,
and `step`, steps after the canary; actions are `raise`, `hang`, and at `step` also `poison`: every step in which the
first request of the nth one takes part raises. Later workers have no fault: nothing could recover otherwise.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the front has no torch
    from foretoken.backend.local import LocalBackend
    from foretoken.core import Batch
    from foretoken.engine.engine import Engine
    from foretoken.server.life.wire import Open

VARIABLE = "FORETOKEN_TEST_WORKER_FAULT"
MODULE = "tests.helpers.faulty_worker"
_EVERY = "every-"


class FaultOnDemand(RuntimeError):
    """What the action `raise` raises."""


@dataclass
class FaultHook:
    """`action` at the `nth` time that `point` is passed, at every nth one if it `repeats`; steps count once armed."""

    point: str
    nth: int
    action: str
    repeats: bool = False
    is_armed: bool = False
    num_passed: int = 0
    poisoned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, text: str) -> FaultHook:
        """The hook of `point:nth:action`."""
        point, nth, action = text.split(":")
        return cls(point, int(nth.removeprefix(_EVERY)), action, nth.startswith(_EVERY))

    def passes(self, point: str) -> None:
        """Count a passage of `point`, and act if it is the one."""
        if point != self.point or not (self.is_armed or point == "load"):
            return
        self.num_passed += 1
        if self._is_due(self.num_passed):
            if self.action == "hang":
                threading.Event().wait()
            if self.action == "raise":
                raise FaultOnDemand

    def _is_due(self, num_passed: int) -> bool:
        return num_passed % self.nth == 0 if self.repeats else num_passed == self.nth

    def watch_steps(self, engine: Engine) -> None:
        """Pass `step` whenever the engine asks the target."""
        runner = engine.runner
        forward: Callable[..., object] = runner.forward

        def hooked(batch: Batch, *arguments: object) -> object:
            numbers = [entry.request.request_id for entry in batch.entries]
            if self.action == "poison" and self.is_armed and self._is_due(self.num_passed + 1):
                self.poisoned.add(numbers[0])
            self.passes("step")
            if self.poisoned.intersection(numbers):
                raise FaultOnDemand
            return forward(batch, *arguments)

        runner.forward = hooked  # type: ignore[method-assign, assignment]


def be_front() -> None:
    """Be the command; workers are this module, and the first one has the fault."""
    from foretoken.cli import main
    from foretoken.server.life import supervisor

    faults, environment = [os.environ.pop(VARIABLE)], supervisor.worker_environment

    def first_faulty() -> dict[str, str]:
        return environment() | ({VARIABLE: faults.pop()} if faults else {})

    supervisor.WORKER_COMMAND = (*supervisor.WORKER_COMMAND[:-1], MODULE)
    supervisor.worker_environment = first_faulty
    main()


def be_worker() -> None:
    """Be the worker, with the fault if it has one."""
    from foretoken.server.life import worker

    if VARIABLE not in os.environ:
        worker.main()
        return
    hook = FaultHook.of(os.environ[VARIABLE])
    build, generate = worker.Worker._build, worker.Worker._generate
    num_calls = 0

    def faulty_build(self: worker.Worker) -> LocalBackend:
        hook.passes("load")
        backend = build(self)
        hook.watch_steps(backend.engine.llm.engine)
        return backend

    async def arming(self: worker.Worker, command: Open, backend: LocalBackend) -> None:
        nonlocal num_calls
        num_calls += 1
        hook.is_armed = num_calls > 1  # the first is the canary
        await generate(self, command, backend)

    worker.Worker._build, worker.Worker._generate = faulty_build, arming  # type: ignore[method-assign]
    worker.main()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        be_worker()
    else:
        be_front()
