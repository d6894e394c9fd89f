"""How many threads compute, and whether those that wait for each other sleep: OpenMP's variables, read when torch is
imported. `control.threads` chooses anew while an engine runs.

Threads that spin while they wait answer sooner: 10 to 25 % of the speed of a process that has its cores alone.
Beside a process that loops they keep the cores from the threads they wait for: drafting, hundreds of short products
each with its barrier, became twelve times as slow on two cores, and six times as fast again when they slept.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foretoken.machine.linux import GROUPS, OWN_GROUP, own_groups, text_of
from foretoken.machine.neighbours import NEIGHBOUR_CORES, OtherLoad, usable_cores

# ---- the cores that this process may use: logical ones, physical ones, and what a control group leaves of them

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cores:
    """`num_logical` of the machine, `num_allowed` of them for this process, on `num_physical` cores.

    `quota` is how many cores' time a control group grants, None where it sets no limit.
    """

    num_logical: int
    num_allowed: int
    num_physical: int
    quota: float | None

    @property
    def num_threads(self) -> int:
        """Threads that compute best: one per physical core, for a pass is bound by memory and hyperthreads share their
        core's units; never more than the quota grants, for a group that is throttled stops every barrier.
        """
        granted = self.num_physical if self.quota is None else int(self.quota)
        return max(1, min(self.num_physical, granted))


def find_cores(topology: Path = _TOPOLOGY, groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> Cores:
    """The cores of this machine; without Linux's files all are physical and there is no quota."""
    allowed = usable_cores()
    return Cores(os.cpu_count() or 1, len(allowed), _num_physical(allowed, topology), _quota(groups, own_group))


def _num_physical(allowed: Sequence[int], topology: Path) -> int:
    """How many cores the logical ones lie on."""
    siblings = {text_of(topology / f"cpu{core}" / "topology" / "thread_siblings_list") for core in allowed}
    return len(allowed) if "" in siblings else len(siblings)


def _quota(groups: Path, own_group: Path) -> float | None:
    """The least quota of this process's group and those above it, in cores."""
    limits = []
    for version, folder in own_groups("cpu", groups, own_group):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(text_of(folder / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # no "max", and no -1
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


Waiting = Literal["sleep", "spin"]

POLICY = "OMP_WAIT_POLICY"
_WAITING = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the standard's, GNU's and LLVM's (Intel's) own
_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Verbs that run for hours: a neighbour that is not there at the start comes later. The event loop of `serve` is one
# from the start; `train` runs no steps of an engine, which would see it come (`set_waiting`).
LONG_RUNNING = frozenset({"serve", "train"})
_WATCH_S = 0.1  # ten ticks of the system's counters


@dataclass(frozen=True)
class ThreadChoice:
    """What was chosen for this process and why; `settings` are the variables that were set."""

    settings: Mapping[str, str]
    waiting: Waiting
    why_waiting: str
    num_threads: int | None  # None: a variable names it, or torch does
    why_number: str


def sleeping() -> dict[str, str]:
    """Variables with which waiting threads sleep, in every runtime of OpenMP that torch comes with."""
    return {POLICY: "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def names_waiting(environment: Mapping[str, str]) -> str | None:
    """The variable by which the user said how threads wait, None if there is none."""
    return next((name for name in _WAITING if name in environment), None)


def waiting_of(environment: Mapping[str, str]) -> Waiting:
    """How threads wait under these variables; without any they spin for milliseconds."""
    policy = environment.get(POLICY, "").strip().lower()
    if policy == "passive" or environment.get("GOMP_SPINCOUNT") == "0" or environment.get("KMP_BLOCKTIME") == "0":
        return "sleep"
    return "spin"


def choose(environment: Mapping[str, str], verb: str | None, cores: Cores, others_cores: float | None) -> ThreadChoice:
    """What a verb of the command line runs with; `others_cores` is what other processes take, None if unknown.

    Variables that the user set stand. Otherwise threads sleep in verbs that run long, and in others where a neighbour
    is seen, or where none could be seen for want of counters.
    """
    settings: dict[str, str] = {}
    named = names_waiting(environment)
    if named is not None:
        why = f"{named}={environment[named]} is set"
    elif verb in LONG_RUNNING:
        settings, why = sleeping(), f"{verb} runs long: a neighbour may come"
    elif others_cores is None:
        settings, why = sleeping(), "this system does not say whether others use the cores"
    elif others_cores >= NEIGHBOUR_CORES:
        settings, why = sleeping(), f"other processes take {others_cores:.1f} cores"
    else:
        why = "no other process uses the cores"
    waiting = waiting_of({**environment, **settings})
    given = next((name for name in _NUMBER if name in environment), None)
    if given is not None:
        return ThreadChoice(settings, waiting, why, None, f"{given}={environment[given]} is set")
    settings["OMP_NUM_THREADS"] = str(cores.num_threads)
    return ThreadChoice(settings, waiting, why, cores.num_threads, _why_number(cores))


def watch_neighbours(load: OtherLoad, began_s: float, sleep: Callable[[float], None] = time.sleep) -> float | None:
    """Cores that others take since `load` was started at `began_s` of its clock, a tenth of a second at least."""
    left_s = _WATCH_S - (time.perf_counter() - began_s)
    if left_s > 0:
        sleep(left_s)
    return load.cores()


def names_number(environment: Mapping[str, str]) -> bool:
    """Whether the user set the number of threads by a variable, rather than the command line for this process."""
    choice = applied()
    is_ours = choice is not None and choice.num_threads is not None
    return not is_ours and any(name in environment for name in _NUMBER)


_applied: list[ThreadChoice] = []  # of this process, at most one


def apply(choice: ThreadChoice) -> None:
    """Set the variables of this process, before torch is imported."""
    os.environ.update(choice.settings)
    _applied[:] = [choice]


def applied() -> ThreadChoice | None:
    """What the command line chose for this process; None in a program that imports the library."""
    return _applied[0] if _applied else None


def _why_number(cores: Cores) -> str:
    if cores.quota is not None and cores.quota < cores.num_physical:
        return f"the control group grants {cores.quota:g} cores"
    return "one for each physical core that is allowed"


# ---- spinning or sleeping, changed while the process runs
#
# GNU's OpenMP, which torch and the compiled kernels share on Linux, lets threads spin for milliseconds, unless it
# manages more threads than there are cores: then they spin for less than a microsecond before they sleep (libgomp,
# `config/linux/wait.h`, `gomp_throttled_spin_count_var`). So an idle team of a thread of its own makes all others
# sleep as long as it is there. Nothing of it runs.

_GRAIN = 32_768  # elements that torch gives a thread at least (`at::internal::GRAIN_SIZE`)


class _IdleTeam:
    """A thread with an OpenMP team of more threads than there are cores, all of them asleep."""

    def __init__(self) -> None:
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="foretoken-waiting", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        import torch

        try:
            count = len(usable_cores()) + 1
            torch.set_num_threads(count)
            torch.empty(count * _GRAIN, dtype=torch.uint8).fill_(0)
        finally:
            self._ready.set()
        self._over.wait()


_lock = threading.Lock()
_team: list[_IdleTeam] = []  # at most one


def may_change() -> bool:
    """Whether threads may be told how to wait: no variable says it, and the runtime is GNU's."""
    return sys.platform == "linux" and names_waiting(os.environ) is None


def current_waiting() -> Waiting:
    """How threads of this process wait now."""
    return "sleep" if _team else waiting_of(os.environ)


def set_waiting(waiting: Waiting) -> None:
    """Let threads of this process wait so, where `may_change`. The calling thread keeps its number of threads."""
    if waiting == current_waiting() or not may_change():
        return
    import torch

    with _lock:
        if waiting == "sleep" and not _team:
            num_threads = torch.get_num_threads()
            _team.append(_IdleTeam())
            torch.set_num_threads(num_threads)  # torch keeps one number for the thread that sets it and all new ones
        elif waiting == "spin" and _team:
            _team.pop().close()
