"""`studies.rank_cost`: both sides answer the same, and the record has every turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.rank_cost import main


def test_ranks_and_one_process_take_turns(
    pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, sizes = tmp_path / "ranks.json", ["--prompt", "5", "--tokens", "6", "--repeats", "2"]
    options = ["--target", str(pair.target), "--dtype", "float32", "--requests", "1,2", "--threads", "1", *sizes]
    monkeypatch.setattr(sys, "argv", ["rank_cost", *options, "--out", str(out)])
    assert main() == 0
    found = json.loads(out.read_text())["results"]
    assert [(one["drafter"], one["requests"]) for one in found] == [
        (drafter, count) for drafter in ("none", "ngram") for count in (1, 2)
    ]
    for one in found:
        assert one["equal"]
        assert {side: len(speeds) for side, speeds in one["tokens_per_s"].items()} == {"one process": 2, "ranks": 2}
    assert len(capsys.readouterr().out.splitlines()) == 5
