"""guidellm, by its command line: every request succeeds and has the tokens that were asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MODEL


@pytest.mark.parametrize("route", ["/v1/chat/completions"])
def test_guidellm_run(server: str, folder: Path, tmp_path: Path, route: str) -> None:
    output = tmp_path / "benchmarks.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server},model={MODEL},request_format={route}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={folder}", "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=4"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={output}"]
    # It drops a result that comes between its last poll and the end of the run: on a busy machine, with polls of 0.1 s.
    environment = {**os.environ, "GUIDELLM__MP_POLL_INTERVAL": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4
    assert not requests["errored"]
