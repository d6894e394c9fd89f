"""Texts as options: said on the line, in a file, from standard input; what they may not hold; and the same value given
twice.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run

PROMPT = "the list"


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_w7_a_prompt_from_a_file_and_from_standard_input(
    foretoken: Run, text_pair: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*arguments: object) -> object:
        done = foretoken(
            "generate",
            "-t",
            text_pair.target,
            "--max-tokens",
            6,
            "--ignore-eos",
            "--json",
            "--prompt-logprobs",
            0,
            *arguments,
        )
        assert done.code == 0, done.err
        found = json.loads(done.lines[-1])
        return found["token_ids"], len(found["prompt_logprobs"])

    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "@x").write_text(PROMPT)
    expected = answer("-p", PROMPT)
    assert answer("-p", "@prompt.txt") == expected
    assert answer("-p", "@@x") == answer("-p", "@@@x".removeprefix("@")) != expected
    piped(monkeypatch, PROMPT.encode())
    assert answer("--prompt", "-") == expected
    (tmp_path / "ids.txt").write_text("5,6,\n7\n")
    assert answer("--prompt-ids", "@ids.txt") == answer("--prompt-ids", "5,6,7")


@pytest.mark.parametrize(
    ("arguments", "data", "code", "message"),
    [
        (("-p", "@nowhere"), b"", 4, "prompt: cannot read nowhere"),
        (("-p", "@."), b"", 4, "prompt: cannot read ."),
        (("-p", "@bad.txt"), b"", 4, "prompt: cannot read bad.txt: line 2 is not UTF-8 (byte 0xff)"),
        (("-p", "-"), b"a\n\xff", 4, "prompt: cannot read standard input: line 2 is not UTF-8 (byte 0xff)"),
        (("-p", "-"), b"", 2, "prompt='': is empty"),
        (
            ("-p", "-", "--prediction", "-"),
            b"x",
            2,
            "prediction='-': standard input is read once, for prompt; give a file as @FILE",
        ),
        (("-p", "@/dev/zero"), b"", 4, "prompt: cannot read /dev/zero: it is longer than"),
        (("-p", "x", "--grammar", "@/dev/zero"), b"", 4, "grammar: cannot read /dev/zero: it is longer than"),
        (
            ("-p", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"),
            b"",
            2,
            "logit_bias='5=2': token 5 has the bias 1 already",
        ),
        (("-p", "x", "--logit-bias", "5=1", "--logit-bias", " 5=1"), b"", 2, "token 5 has the bias 1 already"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_texts_that_cannot_be_had(
    foretoken: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    data: bytes,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("foretoken.files.MAX_BYTES", 1 << 20)
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    piped(monkeypatch, data)
    done = foretoken("generate", *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_w7_closed_standard_input(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    done = foretoken("generate", "-p", "-")
    assert (done.code, "standard input is closed" in done.err) == (4, True)


def test_c2_a_file_with_an_escaped_surrogate_is_refused(foretoken: Run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "good"}\n{"prompt": "bad \\ud800"}\n')
    for arguments in (("bench", "--prompts", "p.jsonl"), ("audit", "--prompts", "p.jsonl")):
        done = foretoken(*arguments)
        assert (done.code, done.out) == (2, "")
        assert "prompts='p.jsonl:2': holds a text that cannot be encoded" in done.err
