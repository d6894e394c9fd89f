"""Signals that would end a process, collected until a training step is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Collects the signals that would end the process, so that a step is never interrupted. Does nothing outside the
    main thread.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    old = {
        number: signal.signal(number, lambda caught, _frame: came.append(caught)) for number in numbers if _ends(number)
    }
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def end_by(number: int) -> None:
    """End as the signal `number` would have, once the state is saved: its handler is called first.

    Raises:
        KeyboardInterrupt: it has no handler, or the handler returned.
    """
    if callable(signal.getsignal(number)):
        signal.raise_signal(number)
    raise KeyboardInterrupt


def _ends(number: int) -> bool:
    """Whether a signal has an effect: nohup ignores SIGHUP, and a shell's background jobs ignore Ctrl-C."""
    return signal.getsignal(number) is not signal.SIG_IGN
