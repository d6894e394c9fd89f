"""schemathesis over the server's own OpenAPI description."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "30")  # of each operation and phase of random requests


def test_schemathesis_all(start: Callable[..., str], tmp_path: Path) -> None:
    """Case 22: every operation, valid and invalid requests: no 5xx, and every answer fits the description."""
    server = start("--max-request-tokens", "64", "--ollama", "--llama-cpp")
    with urlopen(f"{server}/openapi.json") as reply:
        paths = json.load(reply)["paths"]
    operations = [(path, method) for path, methods in paths.items() for method in methods]
    assert ("/v1/chat/completions", "post") in operations
    assert ("/v1/responses", "post") in operations
    assert ("/v1/messages", "post") in operations
    assert ("/v1/messages/count_tokens", "post") in operations
    assert ("/tokenize", "post") in operations
    assert {("/completion", "post"), ("/infill", "post"), ("/slots", "get")} <= set(operations)
    report = tmp_path / "junit.xml"
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server}/openapi.json"]
    command += ["--mode", "all", "--max-examples", EXAMPLES, "--seed", "1", "--request-timeout", "20", "--no-color"]
    command += [
        "--checks",
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
    ]
    command += ["--report", "junit", "--report-junit-path", str(report), "--generation-database", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
