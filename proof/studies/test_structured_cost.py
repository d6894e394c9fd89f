"""What the study of structured answers makes of its turns."""

from __future__ import annotations

from typing import Any

import pytest

from studies.structured_cost import Cell, rows


def turn(number: int, setting: str, seconds: float, answer: str) -> dict[str, Any]:
    prompt = {"num_tokens": 30, "num_steps": 20, "num_drafted": 12, "num_accepted": 10, "answer": answer}
    own = {"form": "schema", "temperature": 1.0, "num_requests": 1}
    return {"round": number, "setting": setting, **own, "seconds": seconds, "prompts": [prompt]}


def test_ratios_are_of_the_same_rounds() -> None:
    turns = [turn(number, "plain", 2.0 + 0.1 * number, "a") for number in range(1, 6)]
    turns += [turn(number, "ngram", 1.0 + 0.05 * number, "a" if number < 5 else "b") for number in range(1, 6)]
    plain, ngram = rows(turns, [Cell("schema", 1.0, 1)], ("plain", "ngram"))
    assert plain["to_plain"][0] == 1.0
    assert ngram["to_plain"][0] == pytest.approx(2.0)
    assert (ngram["rounds"], ngram["tokens_per_step"], ngram["differ"]) == (5, 1.5, 1)
    assert rows(turns, [Cell("free", 1.0, 1)], ("plain",))[0]["rounds"] == 0
