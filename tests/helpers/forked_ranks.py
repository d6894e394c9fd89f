"""Ranks that start in a moment: forked from a process that has imported all that they need."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from typing import Any

from tests.helpers import faulty_rank


def context(*modules: str) -> ForkServerContext:
    """Of processes that have imported these modules and the faulty rank."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.helpers.faulty_rank", *modules])
    return found


class ForkedRank:
    """What `parallel.group` uses of `subprocess.Popen`, for `faulty_rank.COMMAND`."""

    def __init__(self, command: object, *, env: Mapping[str, str], **_: object) -> None:
        assert command == faulty_rank.COMMAND
        given, self_in = os.pipe()
        self_out, told = os.pipe()
        for end in (self_in, self_out):
            os.set_inheritable(end, False)
        self._lock = threading.Lock()
        self._process = context().Process(target=_be, args=(DupFd(given), DupFd(told), dict(env)), daemon=True)
        self._process.start()
        os.close(given)
        os.close(told)
        self.stdin, self.stdout = os.fdopen(self_in, "w"), os.fdopen(self_out)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        with self._lock:
            self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _be(given: Any, told: Any, env: dict[str, str]) -> None:
    """Be a rank that reads `given` and writes `told`."""
    os.environ.update(env)
    sys.stdin, sys.stdout = os.fdopen(given.detach()), os.fdopen(told.detach(), "w")
    faulty_rank.main()
