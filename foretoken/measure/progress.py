"""Progress of a measurement on standard error: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretoken.printing.console import Console

EVERY_S = 30.0  # between two lines

Tell = Callable[[str], None]  # called with what is measured next


@contextmanager
def progress(
    total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic, every_s: float = EVERY_S
) -> Iterator[Tell]:
    """Count up to `total`, one with each call from the second on; the first says what begins.

    Without a terminal: a line with the count and an estimate of what is left, at most every `every_s` seconds.
    """
    console = console or Console(stderr=True)
    began = told = clock()
    done = -1
    with console.bar("measuring", total, counts=True) as bar:

        def tell(words: str) -> None:
            nonlocal done, told
            done += 1
            bar.update(words, advance=int(done > 0))
            now = clock()
            if not console.is_terminal and done and now - told >= every_s:
                told = now
                left_min = (now - began) / done * (total - done) / 60
                console.line(f"measured {done} of {total}, about {left_min:.0f} min left; next: {words}")

        yield tell
