"""Time limits of what a drafter of others' is called for."""

from __future__ import annotations

import time

import pytest

from foretoken import SpecConfig
from foretoken.draft.failures import Deadline, DrafterFailures
from foretoken.draft.group import drafter_key
from foretoken.draft.ngram import NgramDrafter
from foretoken.errors import DrafterWarning, DraftTimeout


def test_h3_a_finish_that_hangs_after_the_last_failure_is_interrupted(failed_drafters: list[str]) -> None:
    is_over = []

    class Held(NgramDrafter):
        def finish(self, request_id: int) -> None:
            for _ in range(1_000):
                time.sleep(0.001)
            is_over.append(request_id)

    failures, key = DrafterFailures(), drafter_key(SpecConfig("ngram"))
    failures.deadlines[key] = Deadline(0.05)
    with pytest.warns(DrafterWarning, match="no reply"):
        failures.add(key, Held(), 7, "no reply", is_last=True)
    assert not is_over


def test_h3_one_that_catches_everything_is_interrupted_again() -> None:
    def stubborn() -> int:
        num_caught = 0
        while num_caught < 2:
            try:
                while True:
                    time.sleep(0.001)
            except Exception:  # noqa: BLE001
                num_caught += 1
        return num_caught

    with pytest.raises(DraftTimeout, match=r"0\.05 s"), Deadline(0.05):
        stubborn()
    for _ in range(200):  # nothing is left pending
        time.sleep(0)


def test_a_deadline_that_is_met_changes_nothing() -> None:
    deadline = Deadline(5.0)
    for _ in range(1000):
        with deadline:
            pass
    with pytest.raises(KeyError), deadline:
        raise KeyError

    def interrupted() -> None:
        try:
            while True:
                time.sleep(0.001)
        except DraftTimeout:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt), Deadline(0.02):
        interrupted()
