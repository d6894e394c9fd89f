"""What belongs to the process that made it: it is neither copied nor used in a fork.

A forked child has none of its parent's threads, and OpenMP (torch, our kernels) waits for its own for ever: the first
product that is shared among threads hangs.
"""

from __future__ import annotations

import os
from typing import ClassVar, NoReturn

from foretoken.errors import InputError

REMEDY = (
    "a forked process has none of its parent's threads and would wait for them for ever; start processes with "
    'multiprocessing.get_context("spawn"), or fork before the first model is opened'
)

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
