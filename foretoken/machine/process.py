"""What concerns this process alone: memory that it keeps, and what it may not share with a fork.

Memory that a step frees stays with the process for the next one. glibc gives large blocks back to the system as soon as
they are free, and every page of the next step is then fetched and cleared anew: with 16 requests and a vocabulary of
49k, a thousand pages a step.

A forked child has none of its parent's threads, and OpenMP (torch, our kernels) waits for its own for ever: the first
product that is shared among threads hangs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import ClassVar, NoReturn

from foretoken.errors import InputError

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


def give_back_freed_memory() -> None:
    """Return what the C library keeps of freed blocks to the system.

    glibc keeps blocks of up to 32 MiB, and what lies between blocks that are in use. What a model is made of lies
    between the temporaries of loading; a step of more rows than any before leaves a place as large as its logits.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # another C library has none
        trim(0)


REMEDY = (
    "a forked process has none of its parent's threads and would wait for them for ever; start processes with "
    'multiprocessing.get_context("spawn"), or fork before the first model is opened'
)


def import_path() -> str:
    """`PYTHONPATH` of a process that this one starts, which finds this package also where it was not installed; `-P`
    keeps the working folder out.
    """
    own = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))


_computing: list[int] = []  # the process that opened a model first, of this one and those it was forked from


def check_not_forked(field: str, process: int) -> None:
    """Refuse what was opened in another `process`, of which this one is a fork.

    Raises:
        InputError: this process is not the one.
    """
    if os.getpid() != process:
        raise InputError(field, f"opened in process {process}", REMEDY)


def note_computing(num_threads: int) -> None:
    """A model is about to be opened in this process, where OpenMP would use `num_threads`.

    Raises:
        InputError: an ancestor of this process had opened one before the fork, and OpenMP would use several threads.
    """
    mine = os.getpid()
    if _computing and _computing[0] != mine and num_threads > 1:
        remedy = f"{REMEDY}, or let the child compute on one thread (torch.set_num_threads(1))"
        raise InputError("model", f"a model was opened in process {_computing[0]} before the fork", remedy)
    _computing[:] = [mine]


class Uncopied:
    """Base of classes whose objects neither `pickle` nor `copy` takes; `copy_remedy` says what to do instead."""

    copy_remedy: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        """Refuse `pickle.dumps`, `copy.copy` and `copy.deepcopy`, which all come here.

        Raises:
            InputError: always.
        """
        raise InputError(type(self).__name__, "pickled or copied", self.copy_remedy)
