"""The study of a narrower cache reads answers with every format and compares them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretoken import LLM, SpecConfig
from foretoken.train.answers import AnswerConfig, write_answers
from studies import cache_quality
from tests.helpers.checkpoints import tiny_checkpoint, token_ids
from tests.helpers.gguf_files import write_gguf


@pytest.mark.filterwarnings("ignore:.*dequantised:UserWarning")
def test_every_format_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_gguf(
        tmp_path / "m.gguf", tiny_checkpoint(tmp_path / "m", "llama", hidden_size=64, intermediate_size=96), "Q8_0"
    )
    answers, out = tmp_path / "answers.jsonl", tmp_path / "found.json"
    with LLM(target, SpecConfig(), cache_tokens=512) as llm:
        write_answers(llm, [token_ids(5), token_ids(7)], answers, AnswerConfig(max_tokens=6), lambda _: None)
    words = ["--target", str(target), "--answers", str(answers), "--documents", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["cache_quality", *words])
    assert cache_quality.main() == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["documents"] == 2
    assert [(row["of"], row["beside"]) for row in found["rows"]] == [
        ("float32 cache", "float64"),
        ("float16 cache", "float64"),
        ("float16 cache", "float32 cache"),
    ]
    assert all(0 <= row["equal_argmax"] <= 1 and 0 <= row["divergence_nats"] < 0.1 for row in found["rows"])
