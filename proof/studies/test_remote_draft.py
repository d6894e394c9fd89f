"""`studies.remote_draft`: the drafter in another process changes no answer, and its loss costs draft tokens alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken import LLM, SamplingParams, SpecConfig, registry
from studies.remote_draft import Remote, main
from tests.helpers.checkpoints import token_ids


def test_all_sides_take_turns(pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADDED", {})
    out, sizes = tmp_path / "remote.json", ["--prompt", "5", "--tokens", "12", "--repeats", "1", "--prompts", "2"]
    models = ["--target", str(pair.target), "--draft", str(pair.draft), "--dtype", "float32"]
    patience = ["--patience-ms", "20000", "--threads", "1", "--num-draft", "3"]
    monkeypatch.setattr(sys, "argv", ["remote_draft", *models, *patience, *sizes, "--out", str(out)])
    assert main() == 0
    (found,) = json.loads(out.read_text())["results"]
    assert found["equal"]
    assert found["late_rounds"] == 0
    assert found["tokens_per_step"]["other process"] == found["tokens_per_step"]["same process"]


def test_a_drafter_that_is_lost_costs_its_draft_tokens(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ADDED", {})
    remote = Remote(str(pair.draft), "float32", 7, 128, 20.0)
    params, spec = SamplingParams(max_tokens=12, ignore_eos=True), SpecConfig("remote", num_draft=3)
    try:
        with LLM(pair.target, SpecConfig(), dtype="float32", cache_tokens=512) as llm:
            plain = llm.generate([token_ids(9)], params)[0].token_ids
            drafted = llm.generate([token_ids(9)], params, spec)[0]
            remote.process.kill()
            remote.process.join()
            alone = llm.generate([token_ids(9)], params, spec)[0]
    finally:
        remote.close()
    assert drafted.token_ids == alone.token_ids == plain
    assert drafted.stats.num_accepted > 0
    assert remote.drafter.is_lost
    assert alone.stats.num_drafted == 0
