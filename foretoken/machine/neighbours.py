"""Whether other processes take the cores.

Where /proc/stat exists: the time that the cores of this process were busy, less the CPU time of this process and of
its ended children; time stolen by a hypervisor counts as others'. Elsewhere the load average, less our own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CONTENDED = 0.1  # of the cores' time: what others may take before a measurement is marked
_MIN_S = 0.05  # a few ticks of 10 ms: less is not told apart from rounding
_STAT = Path("/proc/stat")
NEIGHBOUR_CORES = 0.3  # of one core: less is what a desktop does while nothing is asked of it
_WATCH_S = 0.25  # 25 ticks of the system's counters
_IDLE_SHARE = 0.25  # of an interval, at most: what others take while no step runs says nothing of the next one


class OtherLoad:
    """The share of the cores' time that other processes take. The arguments replace the system's, for tests."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        busy_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] | None = None,
        load: Callable[[], float | None] | None = None,
        num_cores: int | None = None,
    ) -> None:
        cores = usable_cores()
        self.num_cores = num_cores or len(cores)
        self._clock = clock
        self._busy_s = busy_s or (lambda: _busy_s(cores))
        self._own_s = own_s or _own_s
        self._load = load or _load
        self.start()

    def start(self) -> None:
        """Begin an interval."""
        self._began = (self._clock(), self._busy_s(), self._own_s())

    def share(self) -> float | None:
        """Others' share since `start`, from 0 to 1; None where the system does not tell."""
        began_s, busy_before, own_before = self._began
        wall_s, own_s, busy = self._clock() - began_s, self._own_s() - own_before, self._busy_s()
        whole_s = self.num_cores * wall_s
        if whole_s <= 0:
            return None
        if busy is not None and busy_before is not None:
            others_s = busy - busy_before - own_s
        else:
            load = self._load()
            if load is None:
                return None
            others_s = load * wall_s - own_s
        return min(1.0, others_s / whole_s) if others_s > _MIN_S else 0.0

    def cores(self) -> float | None:
        """How many cores others kept busy since `start`; None where the system does not tell."""
        share = self.share()
        return None if share is None else share * self.num_cores


class ContentionWatch:
    """Whether other processes need the cores that threads of this one compute on, told anew every quarter of a second
    of steps. A client that works between its requests takes them from nobody.

    They do where they and `num_threads` together take more than the cores there are, by a third of a core; they no
    longer do when two intervals in a row say so.
    """

    def __init__(self, load: OtherLoad | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._load = load or OtherLoad(clock)
        self._num_cores = self._load.num_cores
        self._began_s = clock()
        self._rested_s: float | None = self._began_s  # when the last step ended, None while one runs
        self._idle_s = 0.0  # of the interval
        self._cores: float | None = None
        self._before: float | None = None

    def is_contended(self, num_threads: int, step_began_s: float) -> bool | None:
        """Whether they do in the step that began then; None where the system does not tell, or nothing was measured
        yet.
        """
        if self._rested_s is not None:
            self._idle_s += step_began_s - self._rested_s
            self._rested_s = None
        elapsed_s = self._clock() - self._began_s
        if elapsed_s >= _WATCH_S:
            if self._idle_s <= _IDLE_SHARE * elapsed_s:
                self._before, self._cores = self._cores, self._load.cores()
            self._load.start()
            self._began_s, self._idle_s = self._clock(), 0.0
        if self._cores is None:
            return None
        busier = self._cores if self._before is None else max(self._cores, self._before)
        return busier + num_threads >= self._num_cores + NEIGHBOUR_CORES

    def rest(self) -> None:
        """A step is over, also one that did nothing."""
        if self._rested_s is None:
            self._rested_s = self._clock()


def is_contended(share: float | None) -> bool:
    """Whether others took more than a measurement can bear."""
    return share is not None and share >= CONTENDED


def contention_notes(counts: Iterable[tuple[int | None, int]], what: str) -> list[str]:
    """A caveat where other processes took the cores, or may have; `counts`: (contended, measured) `what` by row."""
    pairs = list(counts)
    known = [count for count, _ in pairs if count is not None]
    if not pairs or (known and not sum(known)):
        return []
    if not known:
        return ["Whether other processes took the cores is not known: this system does not tell."]
    total = sum(measured for _, measured in pairs)
    share = f"{CONTENDED:.0%} of the cores or more"
    return [f"Other processes took {share} during {sum(known)} of {total} {what}: they are marked."]


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )


def _own_s() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _busy_s(cores: tuple[int, ...], stat: Path = _STAT) -> float | None:
    """Seconds that `cores` were busy since the system started: user, nice, system, interrupts and stolen time."""
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        fields = {line.split()[0]: [int(value) for value in line.split()[1:9]] for line in lines if line[:3] == "cpu"}
        ticks = sum(sum(fields[f"cpu{core}"]) - sum(fields[f"cpu{core}"][3:5]) for core in cores)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# ---- which processes they are, where /proc says it

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
