"""Which machine this is, and which versions run on it: what a measurement holds for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory and accelerator of this machine."""
    import torch  # takes seconds, and options of measurements are read without it

    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or "unknown"
    named = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return named.group(1).strip() if named else platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        return {"foretoken": importlib.metadata.version("foretoken"), **found}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return found
