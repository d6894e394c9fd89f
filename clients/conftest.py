"""A server with the reference target in a process of the project's own environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = os.environ.get("FORETOKEN_PYTHON", str(ROOT / ".venv/bin/python"))
MODEL = "reference"

# Clients that look for updates or send statistics would wait for a network that a test must not need.
os.environ |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference target with a chat template that takes tools."""
    copy = tmp_path_factory.mktemp("model") / "reference"
    shutil.copytree(ROOT / "foretoken/reference/target", copy)
    shutil.copy(HERE / "chat_template.jinja", copy)
    return copy


@pytest.fixture(scope="session")
def start(folder: Path) -> Iterator[Callable[..., str]]:
    """Starts a server with further arguments and returns its address."""
    running: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> str:
        command = [PYTHON, str(HERE / "serve.py"), str(folder), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        running.append(process)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), "the server did not start; see its messages above"
        return address

    yield start_one
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def server(start: Callable[..., str]) -> str:
    """The address of a server, without a path."""
    return start()


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """What clients take as `base_url`."""
    return f"{server}/v1"
