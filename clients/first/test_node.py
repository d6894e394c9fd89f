"""The OpenAI client for Node."""

from __future__ import annotations

import json
import shutil
import subprocess

from conftest import HERE, MODEL


def test_node_client(base_url: str) -> None:
    node = shutil.which("node")
    assert node is not None, "install Node 20 or newer"
    command = [node, str(HERE / "node_client.mjs"), base_url, MODEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"]
    assert found["whole"]
    assert found["usage"][0] == found["usage"][1]
    assert found["call"]["name"] == "pick"
    assert json.loads(found["call"]["arguments"])["on"] in (True, False)
    assert found["finish_reason"] == "tool_calls"
    assert found["status"] == [400, "temperature"]
    assert found["completion"]
    assert found["response"]
    assert found["models"] == [MODEL]
