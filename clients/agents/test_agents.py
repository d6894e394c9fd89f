"""Coding agents, unmodified, one turn each against SmolLM2: it need not code well, but nothing may break."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import HERE, PYTHON, ROOT

BIN = HERE / "agents" / "node_modules" / ".bin"
ASKED = "Say hello."
CODEX = """\
model = "smollm2"
model_provider = "foretoken"
model_context_window = 8192
model_instructions_file = "{instructions}"

[model_providers.foretoken]
name = "foretoken"
base_url = "{url}"
wire_api = "responses"
"""
CONTINUE = """\
name: local
version: 0.0.1
schema: v1
models:
  - name: SmolLM2
    provider: openai
    model: smollm2
    apiBase: {url}
    apiKey: none
    roles: [chat, edit, apply]
    defaultCompletionOptions: {{maxTokens: 64, contextLength: 8192}}
"""
AIDER = "[{name: openai/smollm2, edit_format: whole, use_temperature: false, extra_params: {max_tokens: 64}}]\n"


class Desk:
    """A server of SmolLM2 with a template that takes tools, a repository, and a home without settings."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.work = folder, folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        (self.work / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        for words in (
            ["init", "-q"],
            ["add", "."],
            ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
        ):
            subprocess.run(["git", *words], cwd=self.work, check=True)
        self.log = (folder / "server.log").open("w", encoding="utf-8")
        command = [PYTHON, "-m", "foretoken", "serve", "--json", "--port", "0", "--default-max-tokens", "200"]
        command += ["--chat-template", str(HERE / "agents" / "chatml_tools.jinja")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT, env=environment
        )
        assert self.server.stdout is not None
        line = self.server.stdout.readline()
        assert line, (folder / "server.log").read_text()
        self.url = f"{json.loads(line)['url']}/v1"

    def run(self, *command: str | Path, **environment: str) -> str:
        """What a command prints that must succeed."""
        own = {**os.environ, "HOME": str(self.home), "NO_COLOR": "1", **environment}
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.work,
            env=own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr, self.requests())
        return done.stdout

    def requests(self) -> list[str]:
        """The server's lines about requests."""
        return [line for line in (self.folder / "server.log").read_text().splitlines() if " route=" in line]

    def close(self) -> None:
        """End the server, which must drain."""
        self.server.send_signal(signal.SIGTERM)
        assert self.server.wait(60) == 0
        self.log.close()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    own = Desk(tmp_path_factory.mktemp("desk"))
    yield own
    own.close()


@pytest.fixture
def answered(desk: Desk) -> Iterator[None]:
    """Each agent asks, and every request of it is answered."""
    before = len(desk.requests())
    yield
    lines = desk.requests()[before:]
    assert lines
    assert all(" status=200 " in line for line in lines), lines


@pytest.mark.usefixtures("answered")
def test_codex(desk: Desk) -> None:
    (desk.home / ".codex").mkdir()
    short = desk.folder / "short.md"
    short.write_text("You are a coding agent. Answer briefly.\n")  # its own instructions fill SmolLM2's context
    (desk.home / ".codex" / "config.toml").write_text(CODEX.format(instructions=short, url=desk.url))
    assert desk.run(BIN / "codex", "exec", "--skip-git-repo-check", ASKED).strip()
    assert " route=/v1/responses " in desk.requests()[-1]


@pytest.mark.usefixtures("answered")
def test_continue(desk: Desk) -> None:
    config = desk.folder / "continue.yaml"
    config.write_text(CONTINUE.format(url=desk.url))
    text = desk.run(BIN / "cn", "--config", config, "-p", ASKED, CONTINUE_TELEMETRY_ENABLED="0")
    assert text.strip()
    assert '"status":"error"' not in text


@pytest.mark.usefixtures("answered")
def test_aider(desk: Desk) -> None:
    settings = desk.folder / "aider.yml"
    settings.write_text(AIDER)
    aider = shutil.which("aider", path=str(Path(sys.executable).parent))
    assert aider is not None, "run this with make agents"
    flags = ["--model", "openai/smollm2", "--model-settings-file", str(settings), "--message", ASKED, "--yes-always"]
    flags += ["--no-show-model-warnings", "--analytics-disable", "--no-check-update", "--no-auto-commits", "calc.py"]
    assert desk.run(aider, *flags, OPENAI_API_BASE=desk.url, OPENAI_API_KEY="none").strip()
    assert (desk.work / "calc.py").exists()
