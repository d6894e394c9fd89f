"""Cases of broken files in processes of their own: one that dies is seen, an absurd size exceeds its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

NUM_PROCESSES = 2


def count_outcomes(module: str, folder: Path, num_cases: int) -> Counter[str]:
    """Outcomes of the cases 0 .. `num_cases` - 1 of a helper `module` over its bases in `folder`; none went wrong."""
    share = num_cases // NUM_PROCESSES
    commands = [
        [sys.executable, "-m", module, str(folder), str(i * share), str((i + 1) * share)] for i in range(NUM_PROCESSES)
    ]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for command in commands
    ]
    counts: Counter[str] = Counter()
    for process in running:
        out, _ = process.communicate()
        assert process.returncode == 0, f"a process died: {out[-2000:]}"
        *wrong, last = [json.loads(line) for line in out.splitlines()]
        assert wrong == []
        counts.update(last)
    assert counts.total() == num_cases
    return counts
