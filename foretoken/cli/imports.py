"""What takes seconds to import, and what Ctrl-C means meanwhile. Help and mistakes in options need none of it."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from foretoken.cli.exits import quit_at_once


def import_engine() -> None:
    """Import torch and the engine, once the options are known to be right."""
    with ctrl_c_ends():
        importlib.import_module("foretoken.engine.llm")


@contextmanager
def ctrl_c_ends() -> Iterator[None]:
    """During an import Ctrl-C ends the process at once: an exception inside of torch's import would show in many ways.

    Signals that are ignored, or handled by somebody else, are left alone.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, quit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
