"""Whether threads that wait for each other spin or sleep, changed while the process runs.

GNU's OpenMP, which torch and the compiled kernels share on Linux, lets threads spin for milliseconds, unless it manages
more threads than there are cores: then they spin for less than a microsecond before they sleep (libgomp, `config/linux/
wait.h`, `gomp_throttled_spin_count_var`). So an idle team of a thread of its own makes all others sleep as long as it
is there. Nothing of it runs.
"""

from __future__ import annotations

import os
import sys
import threading

from foretoken.machine.neighbours import usable_cores
from foretoken.machine.threads import Waiting, names_waiting, waiting_of

_GRAIN = 32_768  # elements that torch gives a thread at least (`at::internal::GRAIN_SIZE`)


class _IdleTeam:
    """A thread with an OpenMP team of more threads than there are cores, all of them asleep."""

    def __init__(self) -> None:
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="foretoken-waiting", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """End the team."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        import torch

        try:
            count = len(usable_cores()) + 1
            torch.set_num_threads(count)
            torch.empty(count * _GRAIN, dtype=torch.uint8).fill_(0)
        finally:
            self._ready.set()
        self._over.wait()


_lock = threading.Lock()
_team: list[_IdleTeam] = []  # at most one


def may_change() -> bool:
    """Whether threads may be told how to wait: no variable says it, and the runtime is GNU's."""
    return sys.platform == "linux" and names_waiting(os.environ) is None


def current_waiting() -> Waiting:
    """How threads of this process wait now."""
    return "sleep" if _team else waiting_of(os.environ)


def set_waiting(waiting: Waiting) -> None:
    """Let threads of this process wait so, where `may_change`. The calling thread keeps its number of threads."""
    if waiting == current_waiting() or not may_change():
        return
    import torch

    with _lock:
        if waiting == "sleep" and not _team:
            num_threads = torch.get_num_threads()
            _team.append(_IdleTeam())
            torch.set_num_threads(num_threads)  # torch keeps one number for the thread that sets it and all new ones
        elif waiting == "spin" and _team:
            _team.pop().close()
