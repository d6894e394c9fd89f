"""Entry point: signals, standard streams, exit code.

Signals are handled before anything heavy is imported: importing torch takes seconds, and Ctrl-C must end quietly during
it too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from foretoken.cli.exits import INTERRUPTED, io_failure, open_missing_streams, print_version, quit_at_once, say
from foretoken.machine.neighbours import OtherLoad
from foretoken.machine.threads import (
    LONG_RUNNING,
    ThreadChoice,
    apply,
    choose,
    find_cores,
    names_waiting,
    watch_neighbours,
)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP. `finally` blocks run; the exit code is 128 plus the signal's number, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        self.signal_name = signal.Signals(number).name


def main() -> None:
    """Run the command line of this process, and exit."""
    arguments = sys.argv[1:]
    open_missing_streams(has_results=arguments[:1] not in (["serve"], ["ab-live"]))  # what they print is no result
    takes_interrupts = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # a shell has background jobs ignore them
    if takes_interrupts:
        signal.signal(signal.SIGINT, quit_at_once)
    if arguments == ["--version"]:  # the usual form, without importing torch
        sys.exit(_finish(_version_alone()))
    load, began_s = OtherLoad(), time.perf_counter()  # the neighbours are watched while the verbs are imported
    from foretoken.cli.app import run

    apply(_threads(arguments, load, began_s))
    if takes_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, _terminate)
    try:
        code = run(arguments)
    except Terminated as stop:
        say(f"stopped by {stop.signal_name}")
        code = stop.exit_code
    except KeyboardInterrupt:  # a second one, during the cleanup after the first
        code = INTERRUPTED
    if takes_interrupts:
        signal.signal(signal.SIGINT, quit_at_once)
    sys.exit(_finish(code))


def _threads(arguments: list[str], load: OtherLoad, began_s: float) -> ThreadChoice:
    """How threads of this verb wait, and how many there are: torch reads it when it is imported."""
    from foretoken.cli.verbs import VERBS

    verb = next((word for word in arguments if word in VERBS), None)
    is_seen = verb is not None and verb not in LONG_RUNNING and names_waiting(os.environ) is None
    return choose(os.environ, verb, find_cores(), watch_neighbours(load, began_s) if is_seen else 0.0)


def _version_alone() -> int:
    try:
        print_version()
    except OSError as error:
        return io_failure(error)
    return 0


def _finish(code: int) -> int:
    """Flush the streams; after a failure the interpreter must not try again at exit."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as error:
            code = code or io_failure(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated(number)
