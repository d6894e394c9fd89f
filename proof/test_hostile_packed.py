"""Thousands of broken GPTQ, AWQ, compressed-tensors and FP8 checkpoints: each is refused by name or answers, and none
takes memory that its files do not hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broken_packed import GOOD, make_bases
from tests.helpers.broken_runs import count_outcomes

NUM_CASES = 2000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read from /proc")
def test_thousands_of_broken_checkpoints(tmp_path: Path) -> None:
    make_bases(tmp_path)
    counts = count_outcomes("tests.helpers.broken_packed", tmp_path, NUM_CASES)
    assert set(counts) <= set(GOOD)
    assert counts["refused"] > NUM_CASES // 3
    assert counts["ran"] > NUM_CASES // 20
