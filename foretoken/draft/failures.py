"""Draft failures by request, and the drafters disabled for the rest of a request."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from foretoken.draft.base import Drafter, DrafterKey
from foretoken.errors import DrafterWarning, DraftTimeout, warn

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)


_IDLE_S = 5.0
_AGAIN_S = 1.0  # for a body that caught the exception and went on


class Deadline:
    """`with deadline:` runs its body for at most `limit_s` seconds, then raises `DraftTimeout` in it until it ends.

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


MAX_FAILURES = 3  # of one drafter for one request: an occasional fault costs a round, a broken drafter a few
_MAX_REASON_CHARS = 300

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DrafterFailure:
    """A drafter failed for a request; `is_last` if it is disabled for the request from now on."""

    request_id: int
    drafter: str
    reason: str
    is_last: bool


class DrafterFailures:
    """Runs the calls of drafters so that a failure costs the draft and nothing else."""

    def __init__(self) -> None:
        self.deadlines: dict[DrafterKey, Deadline] = {}  # of drafters with a time limit
        self._counts: dict[int, dict[DrafterKey, int]] = {}  # by request
        self._off: dict[int, set[DrafterKey]] = {}  # by request
        self._untold: list[DrafterFailure] = []
        self._warned: set[DrafterKey] = set()

    def is_off(self, request_id: int, key: DrafterKey) -> bool:
        """Whether a drafter is disabled for a request."""
        return bool(self._off) and key in self._off.get(request_id, ())

    def any_off(self, request_id: int) -> bool:
        """Whether any drafter is switched off for a request."""
        return bool(self._off.get(request_id))

    def attempt(
        self,
        key: DrafterKey,
        drafter: Drafter,
        request_ids: Iterable[int],
        call: Callable[[], _Result],
        must_succeed: bool = False,
    ) -> _Result | None:
        """The result of `call`; None if it fails, which counts for each of the requests.

        With `must_succeed` the drafter is disabled at once, because it has missed committed text.
        """
        try:
            if key not in self.deadlines:
                return call()
            with self.deadlines[key]:
                return call()
        except Exception as error:  # noqa: BLE001 - a drafter may raise anything, and must not fail the request
            reason = f"{type(error).__name__}: {error}"
        for request_id in request_ids:
            self.add(key, drafter, request_id, reason, must_succeed)
        return None

    def add(self, key: DrafterKey, drafter: Drafter, request_id: int, reason: str, is_last: bool = False) -> None:
        """Count a failure of `drafter` for a request; the last tolerated one disables it."""
        counts = self._counts.setdefault(request_id, {})
        counts[key] = counts.get(key, 0) + 1
        is_last = is_last or counts[key] >= MAX_FAILURES
        reason = reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 3] + "..."
        self._untold.append(DrafterFailure(request_id, drafter.name, reason, is_last))
        if is_last and key not in self._off.setdefault(request_id, set()):
            self._off[request_id].add(key)
            # It has failed already: resources that it cannot free are lost, also where freeing them takes too long.
            with contextlib.suppress(Exception), self.deadlines.get(key, contextlib.nullcontext()):
                drafter.finish(request_id)
        if key not in self._warned:
            message = (
                f"drafter {drafter.name!r} failed ({reason}): its draft is dropped, answers are not affected; "
                f"after {MAX_FAILURES}"
            )
            self._warned.add(key)
            warn(DrafterWarning(f"{message} failures it is disabled for the request (stats.draft_failures)"), 2)

    def take(self) -> list[DrafterFailure]:
        """The failures since the last call."""
        taken, self._untold = self._untold, []
        return taken

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._counts.pop(request_id, None)
        self._off.pop(request_id, None)
