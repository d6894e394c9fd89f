"""Cycles that requests leave behind do not wait for as many objects as a quarter of those from before the start."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, sys
from collections import deque
from foretoken.machine.process import freeze_objects
class Cycle:
    count = 0
    def __init__(self):
        self.own = self
        Cycle.count += 1
    def __del__(self):
        Cycle.count -= 1
modules = [[i] for i in range(500_000)]
gc.collect()
if sys.argv[1] == "freeze":
    freeze_objects()
in_flight = deque(maxlen=2_000)  # long enough to be among the oldest
most = 0
for _ in range(250_000):
    in_flight.append(Cycle())
    most = max(most, Cycle.count)
print(most)
"""


def max_alive(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout)


def test_cycles_are_collected_early() -> None:
    assert max_alive("freeze") < 0.7 * max_alive("leave")
