"""Exit codes, and what is written when there is no console yet: nothing heavy is imported here."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import foretoken

INTERRUPTED = 130
CLOSED_PIPE = 141  # the exit code of a program ended by SIGPIPE, as in `yes | head`
_IO_FAILED = 4


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


def quit_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handler of Ctrl-C while nothing is open: during imports, and after the verb."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
