"""An answer and a chat on a real terminal of 40 columns, and Ctrl-C. Each is a process, and torch takes seconds: the
other first commands, and another width, are in `proof/test_first_commands.py`.
"""

from __future__ import annotations

from pathlib import Path

from foretoken.model.names import model_folder
from foretoken.text.tokenizer import load_tokenizer
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


def test_a_line_longer_than_a_terminal_keeps_is_a_message(tmp_path: Path) -> None:
    """Linux's terminals keep 4095 bytes of a line for a program that reads lines, and drop the rest without a word."""
    words = "return " * 250  # typed in parts, as a terminal's buffer holds 4096 bytes
    typed = {"> ": f"{words}#", "#": f"{words}%", "%": f"{words}\n", "\r\n> ": "/stats\n", "tokens cached": "/exit\n"}
    arguments = ("chat", "-t", "reference:target", "--max-tokens", 8, "--cost-profile", "off", "--drafter", "none")
    done = on_terminal(*arguments, columns=40, folder=tmp_path, typed=typed)
    assert done.code == 0, done.text
    tokenizer = load_tokenizer(model_folder("reference:target"))
    assert tokenizer is not None
    read = len(tokenizer.encode(f"{words}#{words}%{words}"))
    assert f"0 of {read} prompt tokens cached" in done.lines
