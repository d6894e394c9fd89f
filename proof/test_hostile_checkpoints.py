"""Thousands of broken checkpoints: each is refused by name or answers as transformers does, and none takes memory its
files do not hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broken_checkpoints import make_bases
from tests.helpers.broken_runs import count_outcomes

# A mistake that one case in 54 meets is seen with probability 0.99, before a release one in 1,000.
NUM_CASES = [250, pytest.param(5000, marks=pytest.mark.release)]


@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read from /proc")
def test_c9_thousands_of_broken_checkpoints(tmp_path: Path, num_cases: int) -> None:
    make_bases(tmp_path)
    counts = count_outcomes("tests.helpers.broken_checkpoints", tmp_path, num_cases)
    assert counts["refused"] > num_cases // 3
    assert counts["exact"] > num_cases // 6
