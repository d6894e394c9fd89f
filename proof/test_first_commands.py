"""A new user's first commands, at 40 and 120 columns and in a log file: each ends with a line that says how it went,
also where Ctrl-C ends it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.terminal import CTRL_C, ROOT, on_terminal
from tests.helpers.usual import some_of

TINY = ("--target", "reference:target")  # what is shown is tested, not what the default model says
BENCH = (*TINY, "--slices", "code", "--prompts-per-slice", "1")
COMMANDS = {
    "demo": ((*TINY, "--max-tokens", "8"), "answers are the same, token for token."),
    "generate": ((*TINY, "--prompt", "def f(x):", "--max-tokens", "8"), "8 tokens in"),
    "bench": (
        (
            *TINY,
            "--slices",
            "code",
            "--prompts-per-slice",
            "1",
            "--repeats",
            "1",
            "--max-tokens",
            "6",
            "--temperatures",
            "0",
        ),
        "Ratios: speculative / foretoken plain",
    ),
    "audit": ((*TINY, "--num-prompts", "2", "--max-tokens", "8"), "PASS: "),
}
CHAT = ((*TINY, "--max-tokens", "8", "--cost-profile", "off"), "1 answers, 8 tokens")
PROMPT = "an answer.\r\n> "  # the first one, behind the line that says what Ctrl-C does
# Runs of minutes, and what a terminal shows when there is something to stop.
LONG = {
    "demo": ((*TINY, "--max-tokens", "1900"), "answering"),
    "bench": (
        (
            *TINY,
            "--slices",
            "code",
            "--prompts-per-slice",
            "1",
            "--repeats",
            "20",
            "--max-tokens",
            "200",
            "--warmup",
            "0",
        ),
        "1/",  # of the answers to measure
    ),
    "audit": (TINY, "greedy answers"),
}
INTERRUPTED = "interrupted; what was written until then is kept"


@pytest.mark.parametrize("columns", [40, pytest.param(120, marks=pytest.mark.release)])
@pytest.mark.parametrize("verb", COMMANDS)
def test_on_a_terminal(verb: str, columns: int, tmp_path: Path) -> None:
    arguments, end = COMMANDS[verb]
    done = on_terminal(verb, *arguments, columns=columns, folder=tmp_path)
    assert done.code == 0, done.text
    assert any(end in line for line in done.lines), done.text


@pytest.mark.parametrize("columns", [40, pytest.param(120, marks=pytest.mark.release)])
def test_a_chat_on_a_terminal(columns: int, tmp_path: Path) -> None:
    arguments, end = CHAT
    typed = {PROMPT: "def f(x):\n", "\r\n> ": "/stats\n", "prompt tokens cached": "/exit\n"}
    done = on_terminal("chat", *arguments, columns=columns, folder=tmp_path, typed=typed)
    assert done.code == 0, done.text
    assert end in done.lines


# What the others write where no terminal is, tests/cli reads without starting a process for each.
@pytest.mark.parametrize("verb", some_of([*COMMANDS, "chat"], {"demo", "chat"}, pytest.mark.release))
def test_in_a_log_file(verb: str, tmp_path: Path) -> None:
    arguments, end = {**COMMANDS, "chat": CHAT}[verb]
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = subprocess.run(
            [sys.executable, "-m", "foretoken", verb, *arguments],
            input=b"def f(x):\n/stats\n" if verb == "chat" else b"",
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


@pytest.mark.parametrize("verb", LONG)
def test_ctrl_c_ends_a_run(verb: str, tmp_path: Path) -> None:
    arguments, sight = LONG[verb]
    done = on_terminal(verb, *arguments, columns=120, folder=tmp_path, typed={sight: CTRL_C})
    assert done.code == 130, done.text
    assert done.lines[-2] == INTERRUPTED, done.text
    if verb == "bench":  # what was measured is shown
        assert re.search(r"The run was interrupted after \d+ of \d+ answers", done.text)


def test_ctrl_c_stops_an_answer_of_a_chat_and_then_ends_it(tmp_path: Path) -> None:
    arguments = ("--target", "reference:target", "--max-tokens", "1900", "--cost-profile", "off")
    typed = {PROMPT: "def f(x):\n", "    ": CTRL_C, "\r\n> ": CTRL_C, "so too.\r\n> ": CTRL_C}
    done = on_terminal("chat", *arguments, columns=120, folder=tmp_path, typed=typed)
    assert done.code == 130, done.text
    assert "Ctrl-C again ends, /exit does so too." in done.lines
    assert done.lines[-2] == INTERRUPTED, done.text
