"""How many threads compute, and whether those that wait for each other sleep: OpenMP's variables, read when torch is
imported. `control.threads` chooses anew while an engine runs.

Threads that spin while they wait answer sooner: 10 to 25 % of the speed of a process that has its cores alone.
Beside a process that loops they keep the cores from the threads they wait for: drafting, hundreds of short products
each with its barrier, became twelve times as slow on two cores, and six times as fast again when they slept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from foretoken.machine.cores import Cores
from foretoken.machine.neighbours import NEIGHBOUR_CORES, OtherLoad

Waiting = Literal["sleep", "spin"]

POLICY = "OMP_WAIT_POLICY"
_WAITING = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the standard's, GNU's and LLVM's (Intel's) own
_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Verbs that run for hours: a neighbour that is not there at the start comes later. The event loop of `serve` is one
# from the start; `train` runs no steps of an engine, which would see it come (`machine.waiting`).
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
