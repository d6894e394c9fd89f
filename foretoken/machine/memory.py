"""Sizes of memory as people write them, and what this machine has free."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foretoken.errors import InputError, StorageError
from foretoken.machine.linux import GROUPS, OWN_GROUP, meminfo, own_groups, text_of

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MAX_BYTES = 1 << 60
_MIN_PLAIN_BYTES = 1 << 16  # a smaller number without a unit was not meant as bytes: no model fits into them
# Files of a control group, by the version of control groups.
_LIMIT_AND_USED = {
    2: ("memory.max", "memory.current"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def parse_bytes(text: str) -> int:
    """Parse "24GiB", "16 GB" or a plain number of bytes.

    Raises:
        InputError: not a number, an unknown unit, or a number so small that its unit was forgotten.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found.group(2).lower() not in _UNITS:
        raise InputError("memory", text, "give a size such as 24GiB, 16GB or 512MiB")
    size = float(found.group(1)) * _UNITS[found.group(2).lower()]
    if size >= _MAX_BYTES:
        raise InputError("memory", text, "is more than any machine has; give a size such as 24GiB")
    if not found.group(2) and size < _MIN_PLAIN_BYTES:
        raise InputError("memory", text, f"would be {size:g} bytes: name the unit, such as {found.group(1)}GiB")
    return int(size)


def available_bytes(device: torch.device) -> int:
    """Free memory now: of the GPU, or of this machine within the limits of its control groups.

    Raises:
        StorageError: the system does not report it; `--memory` replaces it.
    """
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = meminfo().get("MemAvailable")
    if free is None:
        raise StorageError("this system does not report free memory; give it with --memory")
    return min([free, *(max(0, one.limit - one.used) for one in group_memory())])


def physical_bytes() -> int | None:
    """The machine's memory; None where the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class GroupMemory(NamedTuple):
    """Bytes that a control group may use, and those that it does."""

    limit: int
    used: int


# What the system writes back or forgets at need is not in use: files that were read fill a group up to its limit.
_CAN_BE_DROPPED = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)


def group_memory(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> list[GroupMemory]:
    """Of each control group with a limit that this process is in: its own ones and those above them."""
    found = []
    for version, folder in own_groups("memory", groups, own_group):
        limit, used = (text_of(folder / name) for name in _LIMIT_AND_USED[version])
        if limit.isdigit() and used.isdigit():
            dropped = sum(map(int, _CAN_BE_DROPPED.findall(text_of(folder / "memory.stat"))[-1:]))
            found.append(GroupMemory(int(limit), max(0, int(used) - dropped)))
    return found
