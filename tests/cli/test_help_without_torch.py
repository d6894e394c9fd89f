"""Help is printed, and a mistake in an option is found, without torch: it takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.cli.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
# One process for all verbs: the help of each, and whether torch was imported by then.
SCRIPT = """
import sys
from foretoken.cli.app import run
for words in {lines!r}:
    assert run(words) == {code}, words
    heavy = {{"torch", "transformers", "huggingface_hub"}} & set(sys.modules)
    assert not heavy, f"{{words}} imports {{heavy}}"
"""
NESTED = [
    *(["bench", name] for name in ("speed", "load", "profile", "url")),
    *(["train", name] for name in ("lm", "answers", "eagle", "medusa", "block", "adapter", "draft")),
    ["models", "list"],
    ["models", "inspect"],
    ["config", "show"],
]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([*([*words, "--help"] for words in [[], *([name] for name in VERBS), *NESTED])], 0),
        ([[*words, "--no-such-option"] for words in [*([name] for name in VERBS), *NESTED]], 2),
    ],
    ids=["help", "mistakes"],
)
def test_no_verb_needs_torch_for(tmp_path: Path, lines: list[list[str]], code: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(lines=lines, code=code)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
