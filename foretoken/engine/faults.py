"""Faults that are contained: counted, warned of, and kept from failing requests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from foretoken.engine.stats import EngineStats
from foretoken.engine.watch import Watcher
from foretoken.errors import EngineError


class Faults:
    """Counts contained exceptions (`EngineStats.num_faults`) and warns about them."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def tell(self, what: str, error: Exception, consequence: str) -> None:
        """Count a fault and warn: the place, the error, and the consequence.

        Where the caller's filters turn warnings into errors, the fault is only counted: generation continues.
        """
        self._stats.num_faults += 1
        with suppress(Warning):
            warnings.warn(f"{what} raised {type(error).__name__}: {error}; {consequence}", stacklevel=3)

    @contextmanager
    def contained(self, what: str, consequence: str) -> Iterator[None]:
        """Run the body; an exception is counted and suppressed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - contains any error
            self.tell(what, error, consequence)

    def watch(self, watchers: list[Watcher], call: Callable[[Watcher], None]) -> None:
        """Call every observer; one that raises is removed and closed."""
        for watcher in tuple(watchers):
            try:
                call(watcher)
            except Exception as error:  # noqa: BLE001 - an observer must not fail a request
                watchers[:] = [other for other in watchers if other is not watcher]
                name = type(watcher).__name__
                with self.contained(f"closing the observer {name}", "it is left open"):
                    watcher.close()
                self.tell(f"the observer {name}", error, "it is removed, and generation continues")


def engine_error(what: str, error: BaseException) -> EngineError:
    """The error of a request that cannot continue, with its cause attached."""
    broken = EngineError(f"{what}: {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken
