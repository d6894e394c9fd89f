"""Sizes of memory as people write them, and what this machine has free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Free memory now: of the GPU, or of this machine within the limit of its control group.

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
    limit, used = (_control_group(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _control_group(name: str) -> int | None:
    """A value of this process's control group (cgroup v2); None without one or without a limit."""
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
