"""The cores that this process may use: logical ones, physical ones, and what a control group leaves of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.machine.neighbours import usable_cores

_TOPOLOGY = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


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


def find_cores(topology: Path = _TOPOLOGY, groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> Cores:
    """The cores of this machine; without Linux's files all are physical and there is no quota."""
    allowed = usable_cores()
    return Cores(os.cpu_count() or 1, len(allowed), _num_physical(allowed, topology), _quota(groups, own_group))


def _num_physical(allowed: Sequence[int], topology: Path) -> int:
    """How many cores the logical ones lie on."""
    try:
        siblings = {
            (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text("ascii").strip()
            for core in allowed
        }
    except (OSError, ValueError):
        return len(allowed)
    return len(siblings)


def _quota(groups: Path, own_group: Path) -> float | None:
    """The least quota of this process's group and those above it, in cores."""
    limits = [_version_1(groups)]
    try:
        lines = own_group.read_text("utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    path = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = groups / path
    while folder.is_relative_to(groups):
        limits.append(_version_2(folder))
        folder = folder.parent
    return min((limit for limit in limits if limit is not None), default=None)


def _version_2(folder: Path) -> float | None:
    try:
        granted, period = (folder / "cpu.max").read_text("ascii").split()
        return None if granted == "max" else int(granted) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version_1(groups: Path) -> float | None:
    try:
        granted = int((groups / "cpu" / "cpu.cfs_quota_us").read_text("ascii"))
        period = int((groups / "cpu" / "cpu.cfs_period_us").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return granted / period if granted > 0 and period > 0 else None
