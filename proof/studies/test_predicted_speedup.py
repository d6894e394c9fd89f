"""`studies.predicted_speedup` on tiny models: every drafter at every load is predicted and then measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretoken import LLM, SpecConfig
from studies.predicted_speedup import main, tokens_per_s


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "record.json"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{n}(self): return self"}) for n in range(4)))
    options = ["--prompts", str(prompts), "--drafts", "ngram,reference:draft", "--concurrency", "1,2"]
    options += ["--max-tokens", "8", "--repeats", "2", "--budget-s", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["predicted_speedup", *options])
    main()
    found = json.loads(out.read_text())
    places = {(row["drafter"], row["concurrency"]) for row in found["rows"]}
    assert places == {(name, load) for name in ("ngram", "reference:draft") for load in (1, 2)}
    for row in found["rows"]:
        assert row["predicted"] > 0
        assert len(row["by_repeat"]) == 2
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert found["within_15_percent"] == sum(abs(row["error"]) <= 0.15 for row in found["rows"])


def test_as_many_requests_run_as_asked_for_until_no_text_is_left() -> None:
    with LLM("reference:target", SpecConfig(), profile="off") as llm:
        running: list[int] = []
        step = llm.step

        def watched() -> list[object]:
            running.append(len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
            return step()  # type: ignore[return-value]

        llm.step = watched  # type: ignore[assignment,method-assign]
        assert tokens_per_s(llm, SpecConfig(), ["a b", "c d", "e f", "g h"], 2, 4, "t") > 0
    assert max(running) == 2
    assert running.count(2) > running.count(1)
