"""A limit for what may hang where no signal reaches: in a wait of compiled code."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End the test process, with the stacks of all threads, if the body takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
