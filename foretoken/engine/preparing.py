"""The threads that prepare requests, shared out among tenants."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_Job = tuple[Future[Any], Callable[[], Any]]


class PreparingThreads:
    """At most `num_threads` threads, of which one tenant never has all, nor goes before another that has fewer: long
    texts and grammars of one would otherwise hold up the requests of all.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="foretoken-prepare")
        self._most = max(1, num_threads - 1)  # of one tenant
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, the one that has waited longest first
        self._running: Counter[str] = Counter()

    def submit(self, tenant: str, call: Callable[[], _Result]) -> Future[_Result]:
        """What `call` returns, as soon as a thread is free for the tenant.

        Raises:
            RuntimeError: this was shut down.
        """
        job: tuple[Future[_Result], Callable[[], _Result]] = Future(), call
        name = tenant.partition("\0")[0]  # a client may divide its key's tenant further by salts of its own
        with self._lock:
            self._pool.submit(self._run)
            self._waiting.setdefault(name, deque()).append(job)
        return job[0]

    def shutdown(self) -> None:
        """Take nothing more; what waits still runs."""
        self._pool.shutdown(wait=False)

    def _run(self) -> None:
        """Do what waits until a thread more is of no use: who is passed over here is done by a thread of its own."""
        while (taken := self._take()) is not None:
            name, (future, call) = taken
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call())
                    except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
                        future.set_exception(error)
            finally:
                with self._lock:
                    self._running[name] -= 1
                    if not self._running[name]:
                        del self._running[name]

    def _take(self) -> tuple[str, _Job] | None:
        """The next job and its tenant; None where none may begin now."""
        with self._lock:
            free = [name for name in self._waiting if self._running[name] < self._most]
            if not free:
                return None
            name = min(free, key=self._running.__getitem__)
            jobs = self._waiting.pop(name)
            job = jobs.popleft()
            if jobs:
                self._waiting[name] = jobs  # behind the others
            self._running[name] += 1
            return name, job
