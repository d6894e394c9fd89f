"""Which other processes take the cores now, where /proc says it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MIN_CORES = 0.05


@dataclass(frozen=True)
class Neighbour:
    """A process, and how many cores it kept busy."""

    pid: int
    name: str
    cores: float


def neighbours(
    seconds: float = 0.3, most: int = 5, proc: Path = _PROC, sleep: Callable[[float], None] = time.sleep
) -> list[Neighbour] | None:
    """The busiest processes but this one over so many seconds; None where the system does not say."""
    before = _ticks(proc)
    if not before:
        return None
    began_s = time.perf_counter()
    sleep(seconds)
    took = max(seconds, time.perf_counter() - began_s) * os.sysconf("SC_CLK_TCK")
    found = [
        Neighbour(pid, name, round((ticks - before[pid][1]) / took, 2))
        for pid, (name, ticks) in _ticks(proc).items()
        if pid in before and pid != os.getpid()
    ]
    return sorted((one for one in found if one.cores >= _MIN_CORES), key=lambda one: -one.cores)[:most]


def _ticks(proc: Path) -> dict[int, tuple[str, int]]:
    """Name and ticks of CPU time by process."""
    found = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if folder.name.isdigit():
            try:
                head, _, rest = (folder / "stat").read_text("utf-8", errors="replace").rpartition(")")
                fields = rest.split()
                found[int(folder.name)] = (head.partition("(")[2], int(fields[11]) + int(fields[12]))
            except (OSError, ValueError, IndexError):  # it ended meanwhile
                continue
    return found
