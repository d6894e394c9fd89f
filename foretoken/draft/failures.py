"""Which drafters failed for which requests, and which are switched off for the rest of a request."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from foretoken.draft.base import Drafter, DrafterKey
from foretoken.draft.deadline import Deadline
from foretoken.errors import DrafterWarning

MOST_FAILURES = 3  # of one drafter for one request: a chance fault costs a round, a broken drafter no more than a few
_MOST_REASON_CHARS = 300

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DrafterFailure:
    """A drafter's guesses for a request were lost; `is_last` where the request goes on without it from now on."""

    request_id: int
    drafter: str
    reason: str
    is_last: bool


class DrafterFailures:
    """Runs the calls of drafters so that what fails in one costs its guesses and nothing else."""

    def __init__(self) -> None:
        self.deadlines: dict[DrafterKey, Deadline] = {}  # of drafters whose time is bounded
        self._counts: dict[int, dict[DrafterKey, int]] = {}  # by request
        self._off: dict[int, set[DrafterKey]] = {}  # by request
        self._untold: list[DrafterFailure] = []
        self._warned: set[DrafterKey] = set()

    def is_off(self, request_id: int, key: DrafterKey) -> bool:
        """Whether a drafter is switched off for a request."""
        return bool(self._off) and key in self._off.get(request_id, ())

    def any_off(self, request_id: int) -> bool:
        """Whether any drafter is switched off for a request."""
        return bool(self._off.get(request_id))

    def attempt(
        self,
        key: DrafterKey,
        drafter: Drafter,
        request_ids: Iterable[int],
        call: Callable[[], _Result],
        must_succeed: bool = False,
    ) -> _Result | None:
        """What `call` gives; None where it fails, which counts for each of the requests.

        With `must_succeed` the drafter is switched off at once: it does not know the request's text.
        """
        try:
            if key not in self.deadlines:
                return call()
            with self.deadlines[key]:
                return call()
        except Exception as error:  # noqa: BLE001 - a drafter's code may raise anything, and no request may suffer from it
            reason = f"{type(error).__name__}: {error}"
        for request_id in request_ids:
            self.add(key, drafter, request_id, reason, must_succeed)
        return None

    def add(self, key: DrafterKey, drafter: Drafter, request_id: int, reason: str, is_last: bool = False) -> None:
        """Count a failure of `drafter` for a request; the last one that is tolerated switches it off."""
        counts = self._counts.setdefault(request_id, {})
        counts[key] = counts.get(key, 0) + 1
        is_last = is_last or counts[key] >= MOST_FAILURES
        reason = reason if len(reason) <= _MOST_REASON_CHARS else reason[: _MOST_REASON_CHARS - 3] + "..."
        self._untold.append(DrafterFailure(request_id, str(key[0]), reason, is_last))
        if is_last and key not in self._off.setdefault(request_id, set()):
            self._off[request_id].add(key)
            with contextlib.suppress(Exception):  # it failed already: what it cannot free is lost with it
                drafter.finish(request_id)
        if key not in self._warned:
            message = (
                f"drafter {key[0]!r} failed ({reason}): its guesses are dropped, answers are not affected; "
                f"after {MOST_FAILURES}"
            )
            warnings.warn(
                f"{message} failures it is switched off for the request (stats.draft_failures)",
                DrafterWarning,
                stacklevel=2,
            )
            self._warned.add(key)

    def take(self) -> list[DrafterFailure]:
        """What happened since the last call."""
        taken, self._untold = self._untold, []
        return taken

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._counts.pop(request_id, None)
        self._off.pop(request_id, None)
