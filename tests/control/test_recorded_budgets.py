"""Budgets of recorded rounds: what a change of the code alone must not change.

A change of the policy records them anew: python -m tests.control.test_recorded_budgets
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken.control.chooser import Chooser
from studies.worlds import data
from studies.worlds.simulator import Machine, known_of, run
from studies.worlds.worlds import World

RECORD = Path(__file__).parent / "recorded_budgets.json"
WORLDS = (
    (World("1b", ("code", "docstring", "edit", "json", "chat", "random"), 16), "auto"),
    (World("2ms", ("edit", "random"), 4), "auto"),
    (World("1b", ("chat",), 2, "disturbed machine"), "auto"),
    (World("2ms", ("random>edit",), 1), "auto"),
    (World("2ms", ("edit",), 16, "chances too high"), "suffix-auto"),
    (World("1b", ("code",), 4), "draft_model-5"),
)


def budgets_of(world: World, setting: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hash of the option and the number of draft tokens of every request in every round, and their sums."""
    planned, digest, recording = Chooser.plan, hashlib.sha256(), data.load()
    counts = [0, 0]

    def plan(chooser: Chooser, requests: Sequence[Any], previews: Any) -> Any:
        budgets = planned(chooser, requests, previews)
        digest.update(json.dumps([budget[:2] for budget in budgets]).encode())
        counts[0] += len(budgets)
        counts[1] += sum(budget.num_draft for budget in budgets)
        return budgets

    monkeypatch.setattr(Chooser, "plan", plan)
    run(world, setting, Machine(data.profiles()[world.profile], 0.05), known_of(recording, world), 64, seed=3)
    return {"rounds": counts[0], "draft_tokens": counts[1], "sha256": digest.hexdigest()}


@pytest.mark.parametrize(("world", "setting"), WORLDS, ids=lambda one: one if isinstance(one, str) else one.name)
def test_budgets_are_those_recorded(world: World, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    assert budgets_of(world, setting, monkeypatch) == recorded[f"{setting} {world.name}"]


if __name__ == "__main__":
    found = {}
    for world, setting in WORLDS:
        with pytest.MonkeyPatch.context() as patch:
            found[f"{setting} {world.name}"] = budgets_of(world, setting, patch)
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
