"""Ranks that start in a moment: forked from a process that has imported all that they need."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from foretoken.parallel import group
from tests.helpers import faulty_rank
from tests.helpers.faulty_rank import Fault


@contextmanager
def forked(order: Path) -> Iterator[None]:
    """Groups that are opened in the body have such ranks, which look for their faults in the file `order`."""
    Fault(0, "none", 0).tell(order)
    with (
        patch.object(group, "RANK_COMMAND", faulty_rank.COMMAND),
        patch.object(group, "subprocess", SimpleNamespace(Popen=ForkedRank, PIPE=subprocess.PIPE)),
        patch.dict("os.environ", {faulty_rank.VARIABLE: str(order)}),
    ):
        yield


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
