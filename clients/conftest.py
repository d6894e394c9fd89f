"""`foretoken serve` with the reference target, in the project's own environment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
PYTHON = os.environ.get("SERVER_PYTHON", str(ROOT / ".venv/bin/python"))
FLAGS = os.environ.get("SERVER_FLAGS", "").split()  # of every server that is started: --ray, for `make ray`
TARGET = os.environ.get("SERVER_TARGET", "")  # in place of the reference target: smollm2, for `make ray`
MODEL, TEMPLATE = "reference", "chat_template.jinja"

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
    shutil.copy(HERE / TEMPLATE, copy)
    return copy


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the servers of a session keep; kernels, which are named by their sources, stay for the next session."""
    found, kernels = tmp_path_factory.mktemp("cache"), ROOT / ".pytest_cache/client-kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (found / "kernels").symlink_to(kernels)
    return found


@contextmanager
def started(folder: Path, cache: Path, *flags: str) -> Iterator[str]:
    """The address of a server with further flags; at the end it drains and exits with 0."""
    command = [PYTHON, "-m", "foretoken", "serve", "--json", "--port", "0", "--name", MODEL, "--dtype", "float32"]
    template = HERE / "agents/chatml_tools.jinja" if TARGET else folder / TEMPLATE
    command += ["--target", TARGET or str(folder), "--chat-template", str(template)]
    command += ["--cost-profile", "off", "--default-max-tokens", "16", *FLAGS, *flags]
    own = {"PYTHONPATH": str(ROOT), "FORETOKEN_CACHE": str(cache)}
    environment = {"FORETOKEN_MODELS": str(Path.home() / ".cache/foretoken/models"), **os.environ, **own}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; see its messages above"
    yield str(json.loads(line)["url"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 0


@pytest.fixture(scope="module")
def start(folder: Path, cache: Path) -> Iterator[Callable[..., str]]:
    """Starts a server with further flags and returns its address; it ends with the module that started it."""
    with ExitStack() as running:
        yield lambda *flags: running.enter_context(started(folder, cache, *flags))


@pytest.fixture(scope="session")
def server(folder: Path, cache: Path) -> Iterator[str]:
    """The address, without a path, of the server that all tests share which need no flags of their own."""
    with started(folder, cache) as url:
        yield url


@pytest.fixture(scope="session")
def base_url(server: str) -> str:
    """What clients take as `base_url`."""
    return f"{server}/v1"
