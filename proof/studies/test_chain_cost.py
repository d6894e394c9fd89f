"""`studies.chain_cost` on a tiny target: both ways draft, and what is asked of it is in its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from studies.chain_cost import main
from tests.helpers.checkpoints import variant


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = variant(tmp_path, "llama", num_hidden_layers=7), tmp_path / "record.json"
    options = [
        "--weights",
        "int8",
        "--target",
        str(folder),
        "--requests",
        "1,3",
        "--rounds",
        "2",
        "--context",
        "9",
        "--draft-vocab",
        "50",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["chain_cost", *options])
    main()
    raw = json.loads(out.read_text())
    assert set(raw["costs"]) == {"1", "3"}
    for found in raw["costs"].values():
        assert set(found) == {"one call ms", "a call for each token ms", "step ms", "of a step"}
        assert all(number > 0 for number in found.values())
