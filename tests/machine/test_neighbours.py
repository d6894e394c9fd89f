"""Whether others took the cores: with clocks and counters that the tests set."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.machine import neighbours
from foretoken.machine.neighbours import OtherLoad, is_contended


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
