"""How late the event loop runs what is due: the time for which something blocked it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.05  # 20 timers a second cost nothing, and a block of 50 ms is never missed


class LoopLag:
    """Calls `note` with the lateness of a timer, in seconds, as long as the loop runs."""

    def __init__(self, note: Callable[[float], None]) -> None:
        self._note = note
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self) -> None:
        """Begin in the running loop; without effect where that was done."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(EVERY_S, self._tick, loop, loop.time() + EVERY_S)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        now_s = loop.time()
        self._note(max(0.0, now_s - due_s))
        loop.call_later(EVERY_S, self._tick, loop, now_s + EVERY_S)
