"""Ctrl-C reaches the tests and the processes that they start, however pytest was started."""

from __future__ import annotations

import signal


def heed_interrupts() -> None:
    """Take SIGINT and SIGHUP again where they are ignored: shells start background jobs so, `nohup` its programs, and
    children inherit it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
