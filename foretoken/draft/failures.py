"""Draft failures by request, and the drafters disabled for the rest of a request."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from foretoken.draft.base import Drafter, DrafterKey
from foretoken.draft.deadline import Deadline
from foretoken.errors import DrafterWarning

MAX_FAILURES = 3  # of one drafter for one request: an occasional fault costs a round, a broken drafter a few
_MAX_REASON_CHARS = 300

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class DrafterFailure:
    """A drafter failed for a request; `is_last` if it is disabled for the request from now on."""

    request_id: int
    drafter: str
    reason: str
    is_last: bool


class DrafterFailures:
    """Runs the calls of drafters so that a failure costs the draft and nothing else."""

    def __init__(self) -> None:
        self.deadlines: dict[DrafterKey, Deadline] = {}  # of drafters with a time limit
        self._counts: dict[int, dict[DrafterKey, int]] = {}  # by request
        self._off: dict[int, set[DrafterKey]] = {}  # by request
        self._untold: list[DrafterFailure] = []
        self._warned: set[DrafterKey] = set()

    def is_off(self, request_id: int, key: DrafterKey) -> bool:
        """Whether a drafter is disabled for a request."""
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
        """The result of `call`; None if it fails, which counts for each of the requests.

        With `must_succeed` the drafter is disabled at once, because it has missed committed text.
        """
        try:
            if key not in self.deadlines:
                return call()
            with self.deadlines[key]:
                return call()
        except Exception as error:  # noqa: BLE001 - a drafter may raise anything, and must not fail the request
            reason = f"{type(error).__name__}: {error}"
        for request_id in request_ids:
            self.add(key, drafter, request_id, reason, must_succeed)
        return None

    def add(self, key: DrafterKey, drafter: Drafter, request_id: int, reason: str, is_last: bool = False) -> None:
        """Count a failure of `drafter` for a request; the last tolerated one disables it."""
        counts = self._counts.setdefault(request_id, {})
        counts[key] = counts.get(key, 0) + 1
        is_last = is_last or counts[key] >= MAX_FAILURES
        reason = reason if len(reason) <= _MAX_REASON_CHARS else reason[: _MAX_REASON_CHARS - 3] + "..."
        self._untold.append(DrafterFailure(request_id, drafter.name, reason, is_last))
        if is_last and key not in self._off.setdefault(request_id, set()):
            self._off[request_id].add(key)
            with contextlib.suppress(Exception):  # it has failed already: resources that it cannot free are lost
                drafter.finish(request_id)
        if key not in self._warned:
            message = (
                f"drafter {drafter.name!r} failed ({reason}): its draft is dropped, answers are not affected; "
                f"after {MAX_FAILURES}"
            )
            self._warned.add(key)
            with contextlib.suppress(Warning):  # filters that turn it into an error must not fail the request
                warnings.warn(
                    f"{message} failures it is disabled for the request (stats.draft_failures)",
                    DrafterWarning,
                    stacklevel=2,
                )

    def take(self) -> list[DrafterFailure]:
        """The failures since the last call."""
        taken, self._untold = self._untold, []
        return taken

    def finish(self, request_id: int) -> None:
        """Forget a request."""
        self._counts.pop(request_id, None)
        self._off.pop(request_id, None)
