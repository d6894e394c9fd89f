"""Cases of broken files in processes of their own: one that dies is seen, an absurd size exceeds its memory."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

from foretoken.errors import InputError

NUM_PROCESSES = 2
# Beyond what the interpreter holds already: what a case may map, the files included.
SPARE_BYTES = 3 << 30
TOO_LONG_S = 60
# What one case may add to the most that the process ever held: the libraries of a family that comes for the first time,
# and a tiny model.
MAX_GROWN_KIB = 150_000
TryCase = Callable[[Path, Path, int], tuple[str, str]]


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
        assert wrong == [], wrong[:3]
        counts.update(last)
    assert counts.total() == num_cases
    return counts


def try_cases(try_case: TryCase, good: Collection[str], folder: Path, first: int, last: int) -> None:
    """Try the cases `first` .. `last - 1` over the bases in `folder`; print those that went wrong, and the counts.

    `try_case(bases, work, seed)` works in a folder `work` that need not exist and tells (outcome, what was done).
    """
    counts: Counter[str] = Counter()
    work = folder / f"work-{first}"
    try_case(folder, work, first)  # everything is imported and in memory now
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _too_long)
    most = _peak_kib()
    for seed in range(first, last):
        signal.alarm(TOO_LONG_S)
        try:
            outcome, what = try_case(folder, work, seed)
        except InputError as error:
            outcome, what = "blamed on the user", f"{seed}: {error!r}"
        except BaseException as error:  # noqa: BLE001 - a panic of a library too
            outcome, what = "escaped", f"{seed}: {type(error).__name__}: {str(error)[:300]}"
        signal.alarm(0)
        peak, most = _peak_kib() - most, max(most, _peak_kib())
        if peak > MAX_GROWN_KIB:
            outcome, what = "memory", f"{peak:,} KiB: {what}"
        counts[outcome] += 1
        if outcome not in good:
            print(json.dumps({"outcome": outcome, "what": what}), flush=True)
        if (seed + 1 - first) % 500 == 0:
            print(f"{seed + 1 - first:,} of {last - first:,} files", file=sys.stderr, flush=True)
    print(json.dumps(dict(counts)), flush=True)


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"took more than {TOO_LONG_S} s")


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
