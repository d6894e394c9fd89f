"""Sizes of memory as people write them, and what this machine has free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foretoken.errors import InputError, StorageError

if TYPE_CHECKING:
    import torch

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_MAX_BYTES = 1 << 60
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def parse_bytes(text: str) -> int:
    """Parse "24GiB", "16 GB" or a plain number of bytes.

    Raises:
        InputError: not a number, or an unknown unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found.group(2).lower() not in _UNITS:
        raise InputError("memory", text, "give a size such as 24GiB, 16GB or 512MiB")
    size = float(found.group(1)) * _UNITS[found.group(2).lower()]
    if size >= _MAX_BYTES:
        raise InputError("memory", text, "is more than any machine has; give a size such as 24GiB")
    return int(size)


def available_bytes(device: torch.device) -> int:
    """Free memory now: of the GPU, or of this machine within the limits of its control groups.

    Raises:
        StorageError: the system does not report it; `--memory` replaces it.
    """
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        raise StorageError("this system does not report free memory; give it with --memory")
    free = int(found.group(1)) * 1024
    return min([free, *(max(0, one.limit - one.used) for one in group_memory())])


class GroupMemory(NamedTuple):
    """Bytes that a control group may use, and those that it does."""

    limit: int
    used: int


# What the system writes back or forgets at need is not in use: files that were read fill a group up to its limit.
_CAN_BE_DROPPED = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)


def group_memory(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> list[GroupMemory]:
    """Of each control group with a limit that this process is in: its own ones and those above them."""
    found = []
    for folder, limit_name, used_name in _folders(groups, own_group):
        limit, used = _text(folder / limit_name), _text(folder / used_name)
        if limit.isdigit() and used.isdigit():
            dropped = sum(map(int, _CAN_BE_DROPPED.findall(_text(folder / "memory.stat"))[-1:]))
            found.append(GroupMemory(int(limit), max(0, int(used) - dropped)))
    return found


def _folders(groups: Path, own_group: Path) -> Iterator[tuple[Path, str, str]]:
    """Where a group of this process may say its memory, with the names of the limit and of what is used: version 2 of
    control groups, and version 1. A container sees its own group at the top, whatever path the system names.
    """
    paths = {name: path for _, name, path in (line.split(":", 2) for line in _text(own_group).splitlines())}
    first = next((path for names, path in paths.items() if "memory" in names.split(",")), "")
    for top, path, names in (
        (groups, paths.get("", ""), ("memory.max", "memory.current")),
        (groups / "memory", first, ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            yield folder, *names
            folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
