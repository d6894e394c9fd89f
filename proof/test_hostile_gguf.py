"""Ten thousand broken GGUF files: each is refused by name or answers, and none takes memory that it does not hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.broken_gguf import GOOD, make_bases

NUM_CASES = 10_000
NUM_PROCESSES = 2


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read from /proc")
def test_thousands_of_broken_files(tmp_path: Path) -> None:
    """In processes of their own, so that one that dies is seen, with an address space that an absurd size would
    exceed.
    """
    make_bases(tmp_path)
    share = NUM_CASES // NUM_PROCESSES
    commands = [
        [sys.executable, "-m", "tests.helpers.broken_gguf", str(tmp_path), str(i * share), str((i + 1) * share)]
        for i in range(NUM_PROCESSES)
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    counts: Counter[str] = Counter()
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0, f"a process died: {out[-2000:]}"
        *wrong, last = [json.loads(line) for line in out.splitlines()]
        assert wrong == []
        counts.update(last)
    assert counts.total() == NUM_CASES
    assert set(counts) <= set(GOOD)
    assert counts["refused"] > NUM_CASES // 3
    assert counts["ran"] > NUM_CASES // 20
