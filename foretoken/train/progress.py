"""The progress of a training run: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foretoken.printing.console import Console

Show = Callable[[int, float, str], None]  # steps that are done, seconds that they took, what else to say


@contextmanager
def training_progress(
    console: Console, first: int, num_steps: int, step_tokens: int, every_steps: int
) -> Iterator[Show]:
    """A function to call after every step of a run that begins behind `first` steps of `step_tokens` tokens each."""
    with console.bar("training", num_steps, counts=True, stays=True) as bar:
        bar.update(completed=first)

        def show(done: int, seconds: float, words: str) -> None:
            rate = done * step_tokens / max(seconds, 1e-9)
            line = f"{words}, {rate:,.0f} tokens/s"
            bar.update(line, completed=done)
            if done % every_steps == 0 and not console.is_terminal:
                left_s = (num_steps - done) * step_tokens / max(rate, 1e-9)
                console.line(f"step {done}/{num_steps} {line}, about {left_s / 60:.0f} min left")

        yield show
