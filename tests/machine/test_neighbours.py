"""Whether others took the cores: with clocks and counters that the tests set."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.machine import neighbours
from foretoken.machine.neighbours import ContentionWatch, OtherLoad, is_contended


class Machine:
    """A machine with four cores, whose counters the tests advance."""

    def __init__(self, *, tells_busy: bool = True, load: float | None = None) -> None:
        self.now = self.busy = self.own = 0.0
        self.load = OtherLoad(
            lambda: self.now, lambda: self.busy if tells_busy else None, lambda: self.own, lambda: load, 4
        )

    def run(self, seconds: float, own: float, others: float) -> float | None:
        self.load.start()
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds
        return self.load.share()


def test_our_own_work_is_not_others() -> None:
    assert Machine().run(2.0, own=4.0, others=0.0) == 0.0
    assert Machine().run(2.0, own=2.0, others=1.0) == pytest.approx(0.25)


def test_a_tenth_of_the_cores_is_too_much() -> None:
    assert not is_contended(Machine().run(5.0, own=2.0, others=0.3))
    assert is_contended(Machine().run(5.0, own=2.0, others=0.5))
    assert not is_contended(None)


def test_a_few_ticks_mean_nothing() -> None:
    assert Machine().run(0.02, own=1.0, others=1.0) == 0.0


def test_elsewhere_the_load_average_tells_or_nobody() -> None:
    assert Machine(tells_busy=False, load=3.0).run(10.0, own=2.0, others=0.0) == pytest.approx(0.25)
    assert Machine(tells_busy=False).run(10.0, own=2.0, others=2.0) is None


def test_the_counters_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 999 999 1 2 47 5 5\ncpu1 100 0 0 9 9 0 0 0 0 0\n")
    monkeypatch.setattr(neighbours.os, "sysconf", lambda _name: 100)
    assert neighbours._busy_s((0,), stat) == 2.0
    assert neighbours._busy_s((0, 1), stat) == 3.0
    assert neighbours._busy_s((7,), stat) is None
    assert neighbours._busy_s((0,), tmp_path / "none") is None


def test_this_machine_answers_something() -> None:
    share = OtherLoad().share()
    assert share is None or 0.0 <= share <= 1.0


class Watched:
    """Two cores, of which others take a share that the tests set."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        load = OtherLoad(lambda: self.now, lambda: self.busy, lambda: 0.0, lambda: None, 2)
        self.watch = ContentionWatch(load, lambda: self.now)
        self.rest(0.25, 0.0)

    def run(self, seconds: float, others: float, num_threads: int = 2) -> bool | None:
        """What is told when the next step begins, after one of `seconds`."""
        self.now += seconds
        self.busy += others * seconds
        return self.watch.is_contended(num_threads, self.now)

    def rest(self, seconds: float, others: float) -> bool | None:
        """What is told when the next step begins, after `seconds` in which none ran."""
        self.watch.rest()
        return self.run(seconds, others)


def test_a_neighbour_is_seen_after_a_quarter_of_a_second_and_missed_after_two() -> None:
    machine = Watched()
    assert machine.run(0.1, 1.0) is None
    assert machine.run(0.2, 1.0) is True
    assert machine.run(0.25, 0.0) is True  # it may pause
    assert machine.run(0.1, 0.0) is True
    assert machine.run(0.2, 0.0) is False
    assert machine.run(0.25, 1.0) is True


def test_cores_that_no_thread_needs_are_no_contention() -> None:
    assert Watched().run(0.3, 0.9, num_threads=1) is False
    assert Watched().run(0.3, 0.9, num_threads=2) is True
    assert Watched().run(0.3, 1.6, num_threads=1) is True


def test_a_pause_of_the_engine_tells_nothing_of_now() -> None:
    machine = Watched()
    assert machine.run(0.3, 0.0) is False
    assert machine.rest(60.0, 2.0) is False  # measured while nobody asked
    assert machine.run(0.3, 2.0) is True
    assert machine.run(0.3, 0.0) is True
    assert machine.run(0.3, 0.0) is False
    assert machine.rest(0.3, 2.0) is False  # a client that works between its requests
    machine.watch.rest()
    machine.now += 0.2
    machine.busy += 0.4
    assert machine.rest(0.1, 2.0) is False  # also if steps without work were made meanwhile
    assert machine.run(0.24, 0.0) is False
    assert machine.run(0.3, 0.0) is False


def test_a_long_step_tells_of_now() -> None:
    machine = Watched()
    assert machine.run(5.0, 1.0) is True


def test_short_waits_between_steps_are_a_part_of_them() -> None:
    machine = Watched()
    for _ in range(3):
        machine.run(0.09, 1.0)
        told = machine.rest(0.01, 1.0)
    assert told is True
