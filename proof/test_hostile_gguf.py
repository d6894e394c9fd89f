"""Ten thousand broken GGUF files: each is refused by name or answers, and none takes memory that it does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.broken_gguf import GOOD, make_bases
from tests.helpers.broken_runs import count_outcomes

# A mistake that one case in 300 meets is seen with probability 0.99, before a release one in 2,000.
NUM_CASES = [1500, pytest.param(10_000, marks=pytest.mark.release)]


@pytest.mark.parametrize("num_cases", NUM_CASES)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a process's memory is read from /proc")
def test_thousands_of_broken_files(tmp_path: Path, num_cases: int) -> None:
    make_bases(tmp_path)
    counts = count_outcomes("tests.helpers.broken_gguf", tmp_path, num_cases)
    assert set(counts) <= set(GOOD)
    assert counts["refused"] > num_cases // 3
    assert counts["ran"] > num_cases // 20
