"""Rank 0's side of a group of ranks: it starts the other processes, tells them what to compute, and ends them.

A group ends as a whole. Once a rank has died, has not answered within `PATIENCE_S`, or rank 0 has left a pass half-way,
nobody knows what the others hold: all processes are killed, and whatever is asked of the group afterwards raises the
same `RankError`.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretoken.errors import RankError
from foretoken.machine.process import import_path
from foretoken.machine.threads import names_waiting, sleeping
from foretoken.parallel.exchange import LostRankError, RankExchange
from foretoken.parallel.plan import Plan, PlanKind

PATIENCE_S = 4.0  # for another rank in a step; a step that waits longer for one has lost it
LOAD_S = 900.0  # for the other ranks to load their parts, once rank 0 has its own
RANK_COMMAND = (sys.executable, "-P", "-m", "foretoken.parallel.rank")


@dataclass(frozen=True)
class RankSetup:
    """What a process needs to become a rank: one line of JSON on its standard input."""

    rank: int
    world: int
    model: str
    dtype: str
    device: str
    numerics: str
    weights: str
    cache_dtype: str
    num_threads: int
    folder: str  # where the ranks meet
    files: str  # `rank.files_of` the model when it was opened


@dataclass(frozen=True)
class _Process:
    rank: int
    running: subprocess.Popen[str]


class _NotLoadedError(Exception):
    """A rank does not take part; the message says which and why."""


class RankGroup:
    """The processes of ranks 1 to `world` - 1, and the exchange of this one, rank 0.

    Several threads may use it; a plan and what rank 0 computes for it are one `turn`, a lock that the same thread may
    take again. Torch computes with `num_threads` here too while the group lives.
    """

    def __init__(self, setups: Sequence[RankSetup], exchange: RankExchange, folder: Path) -> None:
        self.exchange, self._folder, self.num_threads = exchange, folder, setups[0].num_threads
        self.turn = threading.RLock()
        self._before = torch.get_num_threads()
        self._ended: RankError | None = None
        self._deaths: list[str] = []  # of processes that were not told to end
        self._processes: list[_Process] = []
        self._finalizer = weakref.finalize(self, _kill, self._processes, folder, os.getpid())
        for setup in setups:
            self._processes.append(_started(setup))
        for one in self._processes:
            watch = threading.Thread(target=_watch, args=(one, self._deaths), name="foretoken-rank", daemon=True)
            watch.start()
        torch.set_num_threads(self.num_threads)

    def connect(self) -> None:
        """Wait until every rank has loaded its part, and connect with all.

        Raises:
            RankError: one could not.
        """
        try:
            _await_loaded(self._processes)
            self.exchange.connect(self._folder, PATIENCE_S)
        except Exception as error:
            raise self._end_by(error) from error

    @property
    def failure(self) -> RankError | None:
        """Why the group computes no more; None while it does."""
        if self._ended is None and self._deaths:
            self._ended = RankError(f"{self._deaths[0]}; {_REMEDY}")
        return self._ended

    @property
    def processes(self) -> list[int]:
        """The process of every rank but 0."""
        return [one.running.pid for one in self._processes]

    @contextmanager
    def together(self, plan: Plan, rows: Tensor | None = None) -> Iterator[None]:
        """Tell the ranks a plan, and run the body, which computes the same here; the body waits for no one else.

        Raises:
            RankError: the group has ended, or ended in it.
        """
        with self.turn, _interrupts_deferred():
            if self.failure is not None:
                self.end()
                raise self.failure
            # Set since: the ranks' numbers belong together in a pass. A learner, which asks for single matrices from a
            # thread of its own, keeps its number.
            if plan.kind not in (PlanKind.EMBED, PlanKind.OUTPUT) and torch.get_num_threads() != self.num_threads:
                torch.set_num_threads(self.num_threads)
            try:
                self.exchange.tell(plan, rows)
                yield
                self.exchange.settle()
            except BaseException as error:
                raise self._end_by(error) from error

    def end(self) -> None:
        """Kill the other processes, which hold nothing that is not here too."""
        if self._ended is None:
            self._ended = RankError("the group of ranks was closed")
        if self._finalizer() is not None:
            torch.set_num_threads(self._before)

    def _end_by(self, error: BaseException) -> RankError:
        """The error of a group in which `error` was raised, which ends by it."""
        if isinstance(error, LostRankError) and not error.is_silent:
            ends = time.monotonic() + PATIENCE_S  # a connection closes a moment before its process counts as gone
            while not self._deaths and time.monotonic() < ends:
                time.sleep(0.01)
        if isinstance(error, _NotLoadedError):  # what a rank said before it ended says more than that it did
            why = str(error)
        elif self._deaths:
            why = self._deaths[0]
        elif isinstance(error, LostRankError | TimeoutError):
            who = f"rank {error.rank}" if isinstance(error, LostRankError) else "the other ranks"
            why = f"{who} did not answer within {PATIENCE_S:g} s"
        else:
            why = f"rank 0 left a step that the other ranks run ({type(error).__name__}: {error})"
        self._ended = RankError(f"{why}; {_REMEDY}")
        self.end()
        return self._ended


_REMEDY = "the target's ranks were ended: open the model again"


def _started(setup: RankSetup) -> _Process:
    waiting = {} if names_waiting(os.environ) is not None else sleeping()
    own = {"OMP_NUM_THREADS": str(setup.num_threads), "PYTHONPATH": import_path()}
    process = subprocess.Popen(
        RANK_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**waiting, **os.environ, **own}
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died: its watcher says so
        process.stdin.write(json.dumps(asdict(setup)) + "\n")
        process.stdin.flush()
    return _Process(setup.rank, process)


def _watch(one: _Process, deaths: list[str]) -> None:
    """Note that a rank's process has ended; a group that is closed does not read it any more."""
    code = one.running.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    deaths.append(f"rank {one.rank} (process {one.running.pid}) {how}")


def _await_loaded(processes: Sequence[_Process]) -> None:
    """Wait for each rank's line: its part is loaded, or why not."""
    ends = time.monotonic() + LOAD_S
    for one in processes:
        assert one.running.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(one.running.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, ends - time.monotonic())):
                raise _NotLoadedError(f"rank {one.rank} did not load its part within {LOAD_S:g} s")
            line = one.running.stdout.readline()
        if not line:
            raise LostRankError(one.rank)
        if line != LOADED:
            raise _NotLoadedError(f"rank {one.rank} could not load its part: {line.strip()}")


LOADED = "loaded\n"


def _kill(processes: Sequence[_Process], folder: Path, owner: int) -> bool:
    if os.getpid() != owner:  # a fork has no ranks
        return False
    for one in processes:
        one.running.kill()
    shutil.rmtree(folder, ignore_errors=True)  # before waiting: a server's worker ends once it knows of the failure
    for one in processes:
        one.running.wait()
        for pipe in (one.running.stdin, one.running.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
    return True


_RAISING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Keep Ctrl-C, SIGTERM and SIGHUP, whose handlers raise, until the body is over: a pass that is left half-way ends
    the group.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: found for number in _RAISING if callable(found := signal.getsignal(number))}
    kept: set[int] = set()
    for number in handlers:
        signal.signal(number, lambda came, _frame: kept.add(came))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, handler in handlers.items():  # the end of the program before that of a call
        if number in kept:
            handler(number, None)


def meeting_folder() -> Path:
    """A folder of this user alone, in which ranks find each other."""
    return Path(tempfile.mkdtemp(prefix="foretoken-ranks-"))
