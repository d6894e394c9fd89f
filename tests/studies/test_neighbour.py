"""The table of decoding beside a process that loops."""

from __future__ import annotations

import pytest

from studies.neighbour import PLAIN, summary


def line(drafter: str, waiting: str, beside: bool, repeat: int, speed: float) -> dict[str, object]:
    return {
        "repeat": repeat,
        "prompt": 0,
        "drafter": drafter,
        "waiting": waiting,
        "beside": beside,
        "tokens_per_s": speed,
    }


def test_drafters_are_compared_with_plain_decoding_of_the_same_turn() -> None:
    lines = [
        line(PLAIN, "spin", True, 0, 3.0),
        line("draft_model", "spin", True, 0, 0.9),
        line(PLAIN, "sleep", True, 0, 3.5),
        line("draft_model", "sleep", True, 0, 7.0),
        line(PLAIN, "sleep", True, 1, 7.0),
        line("draft_model", "sleep", True, 1, 7.0),
        line("ngram", "sleep", False, 0, 9.0),  # its plain turn was not reached
    ]
    rows = {(row["drafter"], row["waiting"], row["beside"]): row for row in summary(lines)}
    assert rows["draft_model", "spin", True]["over_plain"] == pytest.approx(0.3)
    assert rows["draft_model", "sleep", True]["over_plain"] == pytest.approx(1.5)
    assert rows["draft_model", "sleep", True]["num_answers"] == 2
    assert rows["ngram", "sleep", False]["over_plain"] is None
