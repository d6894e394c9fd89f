"""guidellm, by its command line: every request succeeds and has the tokens that were asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_guidellm_benchmark(server: str, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "benchmarks.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", server]
    command += ["--processor", str(folder), "--profile", "synchronous", "--max-requests", "4"]
    command += ["--data", "prompt_tokens=32,output_tokens=8", "--output-path", str(output), "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 4
    assert not requests["errored"]
