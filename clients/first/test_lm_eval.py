"""lm-evaluation-harness, `local-completions`: log-likelihoods are those of transformers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from conftest import HERE, MODEL, PYTHON, ROOT
from lm_eval.tasks import TaskManager

TASK: dict[str, Any] = {
    "task": "foretoken_builtins",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(HERE / "tasks/builtins.jsonl")}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_are_those_of_transformers(
    base_url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    results: Any = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{base_url}/completions",
            "tokenizer_backend": "remote",
            "max_retries": 1,
        },
        tasks=[TASK],
        task_manager=TaskManager(include_defaults=False),
        batch_size=batch_size,
        bootstrap_iters=0,
    )
    samples = results["samples"]["foretoken_builtins"]
    asked, found = [], []
    for sample in samples:
        for request, response in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            asked.append([request[0], request[1]])
            found.append(response)
    assert len(asked) == 18
    done = subprocess.run(
        [PYTHON, str(HERE / "reference_scores.py"), str(folder)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=True,
    )
    for (total, is_greedy), (expected, expected_greedy) in zip(found, json.loads(done.stdout), strict=True):
        assert total == pytest.approx(expected, abs=1e-4)
        assert is_greedy == expected_greedy
