"""What only test builds (`FORETOKEN_TEST=1`) have: `/debug/invariants`, and faults on demand,
`FORETOKEN_FAULT=point:nth:action`.

| point | counted | actions |
|---|---|---|
| `load` | starts of an engine | `exit`, `raise`, `hang` |
| `open` | calls that were taken | `exit` |
| `step` | steps of the engine, after the canary | `exit`, `raise`, `hang`, `poison` |

`nth` is a number, or `every-N`: then each Nth passage acts. `poison` marks the first request of the nth step: from then
on every step in which it takes part raises. A worker that was restarted obeys no fault: nothing could recover
otherwise.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import APIRouter

from foretoken.errors import ConfigError
from foretoken.params import is_count

if TYPE_CHECKING:  # the front asks `is_test_build`, and has no torch
    from foretoken.core import Batch
    from foretoken.engine.engine import Engine
    from foretoken.server.life.replicas import Replicas

TEST_VARIABLE = "FORETOKEN_TEST"
FAULT_VARIABLE = "FORETOKEN_FAULT"
_EVERY = "every-"
_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "load": ("exit", "raise", "hang"),
    "open": ("exit",),
    "step": ("exit", "raise", "hang", "poison"),
}


class FaultOnDemand(RuntimeError):
    """What the action `raise` raises."""


@dataclass
class FaultHook:
    """One fault: `action` at the `nth` time that `point` is passed, at every nth one if it `repeats`."""

    point: str = ""
    nth: int = 0
    action: str = ""
    repeats: bool = False
    is_armed: bool = False
    num_passed: int = 0
    poisoned: set[int] = field(default_factory=set)

    def passes(self, point: str) -> None:
        """Count a passage of `point`, and act if it is the one; those of `load` come before the hook is armed.

        Raises:
            FaultOnDemand: that is the action.
        """
        if point != self.point or not (self.is_armed or point == "load"):
            return
        self.num_passed += 1
        if self._is_due(self.num_passed):
            self._act()

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

    def _act(self) -> None:
        if self.action == "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "hang":
            threading.Event().wait()
        if self.action == "raise":
            raise FaultOnDemand


def is_test_build() -> bool:
    """Whether faults may be asked for, and invariants seen."""
    return os.environ.get(TEST_VARIABLE) == "1"


def fault_hook() -> FaultHook:
    """The fault that the environment asks for; one that never acts if there is none.

    Raises:
        ConfigError: no such fault, or one without `FORETOKEN_TEST=1`.
    """
    text = os.environ.get(FAULT_VARIABLE)
    if not text:
        return FaultHook()
    if not is_test_build():
        raise ConfigError(FAULT_VARIABLE, text, f"faults are for tests: set {TEST_VARIABLE}=1, or unset it")
    point, _, rest = text.partition(":")
    nth, _, action = rest.partition(":")
    repeats = nth.startswith(_EVERY)
    nth = nth.removeprefix(_EVERY)
    if action not in _ACTIONS.get(point, ()) or not is_count(nth) or int(nth) < 1:
        known = ", ".join(f"{one}:1:{what}" for one, actions in _ACTIONS.items() for what in actions)
        raise ConfigError(FAULT_VARIABLE, text, f"must be point:nth:action, such as {known}")
    return FaultHook(point, int(nth), action, repeats)


def debug_router(backend: Replicas) -> APIRouter:
    """`/debug/invariants`: what the front and its workers hold at this moment."""
    router = APIRouter()
    router.add_api_route("/debug/invariants", backend.invariants, methods=["GET"], include_in_schema=False)
    return router
