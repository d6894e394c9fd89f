"""An answer and a chat on a real terminal of 40 columns, and Ctrl-C. Each is a process, and torch takes seconds: the
other first commands, and another width, are in `proof/test_first_commands.py`.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.terminal import CTRL_C, on_terminal


def test_ctrl_c_ends_an_answer_with_what_had_come(tmp_path: Path) -> None:
    arguments = (
        "generate",
        "-t",
        "reference:target",
        "--prompt",
        "def f(x):",
        "--max-tokens",
        1900,
        "--cost-profile",
        "off",
    )
    done = on_terminal(*arguments, columns=40, folder=tmp_path, typed={"    ": CTRL_C})
    assert done.code == 130, done.text
    assert done.lines[-3].startswith("stopped after ")
    assert done.lines[-2] == "interrupted; what was written until then is kept"


def test_a_chat_without_a_template(tmp_path: Path) -> None:
    typed = {"an answer.\r\n> ": "def f(x):\n", "\r\n> ": "/stats\n", "prompt tokens cached": "/exit\n"}
    arguments = ("chat", "-t", "reference:target", "--max-tokens", 8, "--cost-profile", "off")
    done = on_terminal(*arguments, columns=40, folder=tmp_path, typed=typed)
    assert done.code == 0, done.text
    assert "reference:target has no chat template: it continues your text, line by line." in done.lines
    assert "1 answers, 8 tokens" in done.lines
