"""Several threads, one engine: which of them may use it now."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Protocol

from foretoken.machine.forks import check_not_forked

_PAUSE_S = 1e-4  # long enough for another thread to take a lock that is free


class Owner(Protocol):
    """What alone runs an `LLM`'s steps while it is open: an `AsyncEngine`."""

    def close(self) -> None:
        """Stop, and give the `LLM` back."""


class Turns:
    """`lock` is held while the engine is used: for one step, one submission. The same thread may take it again.

    A lock that is released goes to the thread that is running, so threads that take it again and again enter the turns
    for as long as they do so (`with turns`), and `pause` in between. A forked process gets neither: a thread that it
    does not have may hold the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._entered: dict[int, int] = {}  # how often, by thread

    @property
    def lock(self) -> threading.RLock:
        """See the class.

        Raises:
            InputError: see `check_process`.
        """
        self.check_process()
        return self._lock

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one whose threads take turns."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse a fork of the process in which this was made.

        Raises:
            InputError: this process is one.
        """
        check_not_forked("llm", self._process)

    def __enter__(self) -> None:
        self.check_process()
        mine = threading.get_ident()
        self._entered[mine] = self._entered.get(mine, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        mine = threading.get_ident()
        self._entered[mine] -= 1
        if not self._entered[mine]:
            del self._entered[mine]

    def pause(self) -> None:
        """Let the other threads that have entered go first; costs nothing where there are none."""
        if len(self._entered) > 1:
            time.sleep(_PAUSE_S)
