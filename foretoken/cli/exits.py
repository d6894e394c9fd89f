"""Exit codes, and what is written when there is no console yet: nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import foretoken

INTERRUPTED = 130
_BY_SIGNAL = 128  # and the number of the signal: the exit code of a program that it ended, as shells have it
CLOSED_PIPE = 141  # the exit code of a program ended by SIGPIPE, as in `yes | head`
_IO_FAILED = 4
_TOGETHER_S = 2.0  # a terminal that closes sends SIGHUP, and then its shell does
ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def open_missing_streams(has_results: bool = True) -> None:
    """Put something behind standard streams that were closed before the start, as in `foretoken ... >&-`.

    Otherwise the next file or socket would take their number, and with it what is written to them. Where standard
    output has results, writing to it fails then, as an answer would be lost in silence; otherwise, and for standard
    error, what is written is dropped.
    """
    for_stdout = os.O_RDONLY if has_results else os.O_WRONLY
    for number, name, flags in ((0, "stdin", os.O_WRONLY), (1, "stdout", for_stdout), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # takes this number: it is the lowest that is free
            assert opened == number
            os.set_inheritable(number, True)
            if number:  # `sys.stdin` stays None, which says that nothing can be read
                stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)


def print_version() -> None:
    """The program's name and version."""
    print(f"foretoken {foretoken.__version__}")


def io_failure(error: OSError) -> int:
    """Report what could not be read or written, and return the exit code; a closed pipe is not reported."""
    if isinstance(error, BrokenPipeError):
        return CLOSED_PIPE
    if error.filename is None and error.strerror is not None:  # files have names
        say(f"error: cannot write the output: {error.strerror}")
    else:
        say(f"error: input or output failed: {error}")
    return _IO_FAILED


def say(words: str) -> None:
    """Write a line to standard error, if possible."""
    with suppress(OSError):
        print(words, file=sys.stderr, flush=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: whatever Ctrl-C leaves in order, they do, and the exit code says which signal it was."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = _code_of(number)
        self.signal_name = signal.Signals(number).name
        self.at_s = time.monotonic()


own_codes: dict[int, int] = {}  # of signals that end this verb in another way than a program
came: list[Terminated] = []  # in this process: typer turns what was raised into a plain exit code


def terminate(number: int, _frame: FrameType | None) -> None:
    """Handler of SIGTERM and SIGHUP while a verb runs; one that comes with another does not cut its partial report.

    Raises:
        Terminated: nearly always.
    """
    stop = Terminated(number)
    if came and stop.at_s - came[-1].at_s < _TOGETHER_S:
        return
    came.append(stop)
    raise stop


def quit_at_once(number: int, _frame: FrameType | None) -> NoReturn:
    """Handler of signals while nothing is open: during imports, and after the verb."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(_code_of(number))


def _code_of(number: int) -> int:
    return own_codes.get(number, _BY_SIGNAL + number)
