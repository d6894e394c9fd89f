"""The threads that prepare requests are shared out among tenants."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest

from foretoken.engine.preparing import PreparingThreads

WAIT_S = 10.0


def blocked(threads: PreparingThreads, tenant: str, count: int) -> tuple[threading.Event, list[Future[bool]]]:
    """Jobs of a tenant that run until the event is set."""
    goes_on = threading.Event()
    return goes_on, [threads.submit(tenant, lambda: goes_on.wait(WAIT_S)) for _ in range(count)]


def test_no_tenant_holds_up_another() -> None:
    threads = PreparingThreads(4)
    goes_on, jobs = blocked(threads, "a", 50)
    salted, others = blocked(threads, "a\0salt", 50)
    try:
        for tenant in ("b", "c"):
            assert threads.submit(tenant, lambda: 7).result(WAIT_S) == 7
        assert sum(job.running() for job in (*jobs, *others)) == 3
    finally:
        goes_on.set()
        salted.set()
    assert all(job.result(WAIT_S) for job in (*jobs, *others))
    threads.shutdown()


def test_who_has_fewer_threads_is_next() -> None:
    threads, order = PreparingThreads(3), list[str]()
    goes_on, jobs = blocked(threads, "a", 2)
    held, other = blocked(threads, "b", 1)
    waiting = [threads.submit(name, lambda name=name: order.append(name)) for name in ("a", "a", "a", "b", "c")]  # type: ignore[misc]
    held.set()
    for job in waiting[3:]:
        job.result(WAIT_S)
    assert order[:2] == ["c", "b"] or order[:2] == ["b", "c"]
    goes_on.set()
    for job in (*jobs, *other, *waiting):
        job.result(WAIT_S)
    threads.shutdown()


def test_errors_cancelled_jobs_and_the_end() -> None:
    threads = PreparingThreads(1)
    goes_on, jobs = blocked(threads, "a", 1)
    left, failing = threads.submit("a", lambda: 1), threads.submit("a", lambda: {}["x"])
    assert left.cancel()
    goes_on.set()
    with pytest.raises(KeyError):
        failing.result(WAIT_S)
    with pytest.raises(CancelledError):
        left.result(WAIT_S)
    assert jobs[0].result(WAIT_S)
    last = [threads.submit("b", lambda: 2) for _ in range(3)]
    threads.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit("b", lambda: 3)
    assert [one.result(WAIT_S) for one in last] == [2, 2, 2]
