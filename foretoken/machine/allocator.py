"""Memory that a step frees stays with the process for the next one.

glibc gives large blocks back to the system as soon as they are free, and every page of the next step is then fetched
and cleared anew: with 16 requests and a vocabulary of 49k, a thousand pages a step.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 256 << 20  # free memory at the end of the heap above which some is given back
_MAPPED_BYTES = 32 << 20  # larger blocks are mapped by themselves; the most that glibc takes
_SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory, once in a process; whether it does.

    False: it is not glibc, or the user set its thresholds.
    """
    return _kept(any(name in os.environ for name in _SET_BY_USERS))


@functools.cache
def _kept(is_set_by_user: bool) -> bool:
    if is_set_by_user or platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
