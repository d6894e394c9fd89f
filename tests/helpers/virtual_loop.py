"""An event loop whose time passes only while nothing can run: waits take no time, and clocks are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits for nothing: the time of a wait is added to the clock instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits for something that never comes")
        if not ready and timeout:
            self.now_s += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 0."""

    def __init__(self) -> None:
        self._own = _Selector()
        super().__init__(self._own)

    def time(self) -> float:
        return self._own.now_s


def run_virtually(work: Coroutine[Any, Any, _Result]) -> _Result:
    """`asyncio.run` on a loop of its own time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
