"""A time limit for drafters registered by the user, enforced by interrupting them.

Python cannot end a call from outside, but it can raise an exception in the thread that runs it. That ends loops and
everything else that returns to the interpreter now and then; a call that stays inside C code is interrupted when it
returns.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType

from foretoken.errors import DraftTimeout

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


_IDLE_S = 5.0
_AGAIN_S = 1.0  # for a body that caught the exception and went on


class Deadline:
    """`with deadline:` runs its body for at most `limit_s` seconds, then raises `DraftTimeout` in it repeatedly until
    it ends.

    A watcher thread starts at the first use and ends when it has been idle for a while. The exception may arrive as
    late as the exit of the block, so catch it around the whole `with`.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._poll_s = min(0.5, limit_s / 10)  # entering a block does not wake the watcher: it polls
        self._changed = threading.Condition()
        self._thread_id: int | None = None  # of the running body
        self._ends_s = 0.0
        self._is_over = False
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._changed:
            self._thread_id, self._ends_s, self._is_over = threading.get_ident(), time.monotonic() + self.limit_s, False
            if self._watcher is None or not self._watcher.is_alive():
                self._watcher = threading.Thread(target=self._watch, name="foretoken-deadline", daemon=True)
                self._watcher.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._thread_id = None
        if self._is_over and (kind is None or issubclass(kind, Exception)):
            time.sleep(0)  # a pending exception is delivered here at the latest
            raise DraftTimeout(f"took longer than {self.limit_s:g} s")

    def _watch(self) -> None:
        with self._changed:
            last_use_s = time.monotonic()
            while (now_s := time.monotonic()) - last_use_s < _IDLE_S:
                if self._thread_id is not None:
                    last_use_s = now_s
                    if now_s >= self._ends_s:
                        self._is_over, self._ends_s = True, now_s + _AGAIN_S
                        _raise_in(self._thread_id, DraftTimeout)
                self._changed.wait(self._poll_s)
            self._watcher = None
