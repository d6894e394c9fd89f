"""A new user's first commands, at 40 and 120 columns and in a log file: each ends with a line that says how it went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.terminal import ROOT, on_terminal

COMMANDS = {
    "demo": (("--to", "none", "--repeats", "1", "--max-tokens", "8"), "Median of 1 repeats on this machine, just now."),
    "generate": (("--prompt", "def f(x):", "--max-tokens", "8"), "8 tokens in"),
    "bench": (
        ("--slices", "code", "--prompts-per-slice", "1", "--repeats", "1", "--max-tokens", "6", "--temperatures", "0"),
        "Ratios: speculative / foretoken plain",
    ),
    "audit": (("--num-prompts", "2", "--max-tokens", "8"), "PASS: "),
}


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize("verb", COMMANDS)
def test_on_a_terminal(verb: str, columns: int, tmp_path: Path) -> None:
    arguments, end = COMMANDS[verb]
    done = on_terminal(verb, *arguments, columns=columns, folder=tmp_path)
    assert done.code == 0, done.text
    assert any(end in line for line in done.lines), done.text


@pytest.mark.parametrize("verb", COMMANDS)
def test_in_a_log_file(verb: str, tmp_path: Path) -> None:
    arguments, end = COMMANDS[verb]
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = subprocess.run(
            [sys.executable, "-m", "foretoken", verb, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            check=False,
            timeout=120,
        ).returncode
    text = log.read_text(encoding="utf-8")
    assert code == 0, text
    assert end in text
    assert "\x1b" not in text
