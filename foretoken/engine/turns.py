"""Several threads, one engine: who may use it now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 1e-4  # long enough for another thread to take a lock that is free


class Turns:
    """`lock` is held while the engine is used: for one step, one submission. The same thread may take it again.

    A lock that is released goes to the thread that is running, so a thread that takes it in a loop calls `pause` in between.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._present: set[int] = set()

    @contextmanager
    def present(self) -> Iterator[None]:
        """For as long as a thread is about to take the lock, once or again and again."""
        mine = threading.get_ident()
        if mine in self._present:
            yield
            return
        self._present.add(mine)
        try:
            yield
        finally:
            self._present.discard(mine)

    def pause(self) -> None:
        """Let the other threads that are present go first; costs nothing where there are none."""
        if len(self._present) > 1:
            time.sleep(_PAUSE_S)
