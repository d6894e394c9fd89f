"""Freed memory stays with the process, unless the user set glibc's thresholds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from foretoken.machine import process

PAGES_OF_A_BLOCK = (4 << 20) // os.sysconf("SC_PAGE_SIZE")
PROGRAM = """
import resource, sys
import numpy as np
from foretoken.machine.process import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def step():  # two blocks of 4 MiB, as logits and probabilities
    a = np.ones(1 << 20, np.float32)
    b = np.ones(1 << 20, np.float32)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[bool, int]:
    own = {name: value for name, value in os.environ.items() if name not in process._SET_BY_USERS}
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True, check=True, timeout=120)
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_pages_are_not_fetched_anew_for_every_step() -> None:
    assert faults("keep") == (True, pytest.approx(0, abs=PAGES_OF_A_BLOCK))
    assert faults("leave")[1] > 10 * PAGES_OF_A_BLOCK  # what this is for


def test_thresholds_of_the_user_stand() -> None:
    assert not faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0]
