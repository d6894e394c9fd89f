"""`foretoken serve` with the reference target, in the project's own environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = os.environ.get("SERVER_PYTHON", str(ROOT / ".venv/bin/python"))
FLAGS = os.environ.get("SERVER_FLAGS", "").split()  # of every server that is started: --ray, for `make ray`
MODEL = "reference"

# Clients that look for updates or send statistics would wait for a network that a test must not need.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference target with a chat template that takes tools."""
    copy = tmp_path_factory.mktemp("model") / "reference"
    shutil.copytree(ROOT / "tests/reference/target", copy)
    shutil.copy(HERE / "chat_template.jinja", copy)
    return copy


@pytest.fixture(scope="session")
def start(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a server with further flags and returns its address; at the end it drains and exits with 0."""
    running: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FORETOKEN_CACHE": str(tmp_path_factory.mktemp("cache"))}

    def start_one(*flags: str) -> str:
        command = [
            PYTHON,
            "-m",
            "foretoken",
            "serve",
            "--json",
            "--port",
            "0",
            "--target",
            str(folder),
            "--name",
            MODEL,
        ]
        command += ["--dtype", "float32", "--cost-profile", "off", "--default-max-tokens", "16", *FLAGS, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start; see its messages above"
        return str(json.loads(line)["url"])

    yield start_one
    for process in running:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(180) for process in running] == [0] * len(running)


@pytest.fixture(scope="session")
def server(start: Callable[..., str]) -> str:
    """The address of a server, without a path."""
    return start()


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """What clients take as `base_url`."""
    return f"{server}/v1"
