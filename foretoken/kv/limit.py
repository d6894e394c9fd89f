"""How large a cache may be: what the machine could ever hold, asked before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def largest_cache_bytes(device: torch.device) -> int | None:
    """Most bytes that a cache on `device` could hold; None if the system does not say.

    A GPU's cache is allocated at once, so the limit is the memory that is free now. A CPU's takes memory only as it
    fills, and what is free then is not known yet: the limit is all the memory of the machine, of its control group, or
    of this process's address space, whichever is least. A larger cache could never be filled.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = (_physical_bytes(), _control_group_bytes(), _address_space_bytes())
    return min((limit for limit in known if limit is not None), default=None)


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _control_group_bytes() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _address_space_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
