"""Waiting for a condition on values that others change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Announcements:
    """Whoever changes a value announces it; whoever waits looks again. For one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def announce(self) -> None:
        """Something has changed."""
        for one in self._waiting:
            if not one.done():
                one.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds."""
        while not condition():
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)
