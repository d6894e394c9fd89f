"""simonw/llm, by its command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODEL


@pytest.fixture(scope="module")
def run(base_url: str, tmp_path_factory: pytest.TempPathFactory):
    home = tmp_path_factory.mktemp("llm")
    fields = {"model_id": "served", "model_name": MODEL, "api_base": base_url, "api_key_name": "none"}
    model = [fields | {"supports_schema": True, "supports_tools": True}]
    (home / "extra-openai-models.yaml").write_text(json.dumps(model))  # YAML reads JSON
    (home / "keys.json").write_text('{"none": "none"}')
    environment = {**os.environ, "LLM_USER_PATH": str(home), "PYTHONUTF8": "1"}

    def run_llm(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_llm


def test_prompt_with_and_without_streaming(run) -> None:
    common = ["-m", "served", "-o", "max_tokens", "12", "-o", "temperature", "0", "A function that adds."]
    streamed, whole = run(*common), run("--no-stream", *common)
    assert streamed.strip() == whole.strip()
    assert whole.strip()


def test_schema(run) -> None:
    greedy = ("-o", "temperature", "0", "-o", "max_tokens", "60")  # sampled, 40 tokens may all be white space
    found = run("-m", "served", "--schema", "on bool", *greedy, "--no-stream", "A switch.")
    assert '"on"' in found


def test_tools(run) -> None:
    found = run("-m", "served", "-T", "llm_version", "-o", "max_tokens", "8", "--no-stream", "Which version?")
    assert found is not None
