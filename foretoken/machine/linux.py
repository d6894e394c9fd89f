"""Files in which Linux says what this process may use: its control groups, memory and processors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def text_of(path: Path) -> str:
    """The text of a file, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""


def meminfo() -> dict[str, int]:
    """Bytes of the machine's memory by Linux's names; none on other systems."""
    found = re.findall(r"^(\w+):\s*(\d+) kB", text_of(Path("/proc/meminfo")), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def own_groups(controller: str, groups: Path, own_group: Path) -> Iterator[tuple[int, Path]]:
    """The folders of this process's control groups and of those above them, each with its version of control groups, 2
    and then 1. A container sees its own group at the top, whatever path the system names.
    """
    paths = {name: path for _, name, path in (line.split(":", 2) for line in text_of(own_group).splitlines())}
    first = next((path for names, path in paths.items() if controller in names.split(",")), "")
    for version, top, path in ((2, groups, paths.get("", "")), (1, groups / controller, first)):
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            yield version, folder
            folder = folder.parent
