"""The learner's thread: one core, its share, and what happens when it fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from foretoken.adapt.adaptation import Rest
from foretoken.adapt.adapter import LearnerThread


class Source:
    """Units of work of a millisecond of processor time."""

    def __init__(self) -> None:
        self.num_units, self.nice, self.num_threads = 0, 0, 0

    def work(self) -> Iterator[Rest]:
        while True:
            began = time.thread_time()
            while time.thread_time() - began < 0.001:
                pass
            self.num_units += 1
            self.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            self.num_threads = torch.get_num_threads()
            yield Rest.SHORT


def until(condition: object, limit_s: float = 120.0) -> None:
    began = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - began < limit_s
        time.sleep(0.002)


def test_it_keeps_its_own_settings() -> None:
    source, before, own_nice = Source(), torch.get_num_threads(), os.nice(0)
    units = source.work()
    background = LearnerThread(lambda: [units], 0.05, pytest.fail)
    torch.set_num_threads(2)
    try:
        background.start()
        until(lambda: source.num_units > 20)
        background.close()
        assert background.spent_s > 0
        assert torch.get_num_threads() == 2
        assert source.num_threads == 1
        new: list[int] = []
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert new == [2], "threads that begin later are not held to one"
    finally:
        torch.set_num_threads(before)
    assert os.nice(0) == own_nice
    if sys.platform == "linux":
        assert source.nice == 19
    num_units = source.num_units
    time.sleep(0.02)
    assert source.num_units == num_units, "closed"


def test_what_a_unit_raises_ends_learning_alone() -> None:
    def broken() -> Iterator[Rest]:
        yield Rest.SHORT
        raise RuntimeError("no gradient")

    errors: list[Exception] = []
    units = broken()
    background = LearnerThread(lambda: [units], 1.0, errors.append)
    background.start()
    until(lambda: errors)
    background.close()
    assert "no gradient" in str(errors[0])


def test_closed_before_it_began_it_learns_nothing() -> None:
    asked: list[str] = []
    errors: list[Exception] = []

    def sources() -> list[Iterator[Rest]]:
        asked.append("for work")
        return []

    background = LearnerThread(sources, 0.5, errors.append)
    background.close()
    background.start()
    background.close()
    assert asked == errors == []
    assert background.spent_s == 0.0
