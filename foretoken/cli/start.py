"""Entry point: signals, standard streams, exit code.

Signals are handled before anything heavy is imported: importing torch takes seconds, and Ctrl-C must end quietly during
it too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from foretoken.cli import exits
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


def main() -> None:
    """Run the command line of this process, and exit."""
    arguments = sys.argv[1:]
    exits.open_missing_streams(arguments[:1] not in (["serve"], ["ab-live"]))  # what they print is no result
    takes_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a shell's background job
    if takes_interrupts:
        signal.signal(signal.SIGINT, exits.quit_at_once)
    if arguments == ["--version"]:  # the usual form, without importing torch
        sys.exit(_finish(_version_alone()))
    handlers: dict[int, Any] = {
        number: exits.terminate for number in exits.ENDING if signal.getsignal(number) is signal.SIG_DFL
    }
    if arguments[:1] == ["serve"]:
        exits.own_codes[signal.SIGTERM] = 0  # an orderly end, whether the server listens yet or not
        if signal.SIGTERM in handlers:
            signal.signal(signal.SIGTERM, exits.quit_at_once)
    load, began_s = OtherLoad(), time.perf_counter()  # the neighbours are watched while the verbs are imported
    from foretoken.cli.app import run

    apply(_threads(arguments, load, began_s))
    if takes_interrupts:  # what is ignored stays so, as nohup has it
        handlers[signal.SIGINT] = signal.default_int_handler
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        code = run(arguments)
    except KeyboardInterrupt:  # a second one, during the cleanup after the first
        code = exits.INTERRUPTED
    for number in handlers:
        signal.signal(number, exits.quit_at_once)
    if code == exits.INTERRUPTED and exits.came:
        exits.say(f"stopped by {exits.came[0].signal_name}")
        code = exits.came[0].exit_code
    sys.exit(_finish(code))


def _threads(arguments: list[str], load: OtherLoad, began_s: float) -> ThreadChoice:
    """How threads of this verb wait, and how many there are: torch reads it when it is imported."""
    from foretoken.cli.verbs import VERBS

    verb = next((word for word in arguments if word in VERBS), None)
    is_seen = verb is not None and verb not in LONG_RUNNING and names_waiting(os.environ) is None
    return choose(os.environ, verb, find_cores(), watch_neighbours(load, began_s) if is_seen else 0.0)


def _version_alone() -> int:
    try:
        exits.print_version()
    except OSError as error:
        return exits.io_failure(error)
    return 0


def _finish(code: int) -> int:
    """Flush the streams; after a failure the interpreter must not try again at exit."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as error:
            code = code or exits.io_failure(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
