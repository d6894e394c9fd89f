"""The verbs are imported when they are needed: help, wrong verbs and completion answer without torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from foretoken.cli import verbs
from foretoken.cli.app import app
from foretoken.cli.exits import quit_at_once
from tests.cli.conftest import Run

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_help_versions_and_wrong_verbs_import_no_torch() -> None:
    code = """
import json, sys
from foretoken.cli.app import run
lines = ("--help", "-h", "", "--version", "--version --help", "nope", "--nope", "gen -x")
codes = [run(line.split()) for line in lines]
print(json.dumps([codes, [name for name in ("torch", "numpy", "transformers") if name in sys.modules]]))
"""
    out = python(code)
    assert json.loads(out.splitlines()[-1]) == [[0, 0, 2, 0, 0, 2, 2, 2], []]
    assert re.search("^  eval +Measure acceptance by drafter", out, re.MULTILINE)


def completions(words: str, place: int) -> list[str]:
    """What bash is offered; fails where torch is imported for it."""
    code = """
import sys
sys.modules["torch"] = None
from foretoken.cli import main
main()
"""
    variables = {"_FORETOKEN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    return python(code, **variables).split()


def test_verbs_are_completed_without_torch() -> None:
    """Also where the settings are broken: their error belongs to a command, not to a key press."""
    Path("foretoken.toml").write_text("broken")
    assert completions("foretoken e", 1) == ["eval", "export"]
    assert completions("foretoken ", 1) == list(verbs.VERBS)


def test_options_of_verbs_are_completed(
    foretoken: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("_FORETOKEN_COMPLETE", "complete_bash"),
        ("COMP_WORDS", "foretoken eval --ag"),
        ("COMP_CWORD", "2"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stop:
        foretoken()
    assert (stop.value.code, capsys.readouterr().out.split()) == (0, ["--against"])


def test_completion_is_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['foretoken', '--install-completion', 'bash']\nfrom foretoken.cli import main; main()"
    )
    out = python(code, HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "bash completion installed in" in out
    (script,) = (tmp_path / ".bash_completions").iterdir()
    assert "complete -o default -F _foretoken_completion foretoken" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_every_verb_is_there_under_its_summary() -> None:
    """The summary is what the verb's own help begins with: change both, here and there."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) == len(list(commands)) == len(verbs.VERBS)
    for name, source in verbs.VERBS.items():
        assert commands[name].name == name
        assert " ".join((commands[name].help or "").partition("\n\n")[0].split()) == source.summary, name
    assert commands["plan"] is commands["plan"]
    assert "nope" not in commands
    assert commands.get("nope") is None


def test_ctrl_c_ends_the_process_while_a_verb_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    load = verbs.importlib.import_module

    def noted(name: str) -> object:
        seen.append(signal.getsignal(signal.SIGINT))
        return load(name)

    monkeypatch.setattr(verbs.importlib, "import_module", noted)
    before = signal.getsignal(signal.SIGINT)
    verbs.LazyVerbs()["config"]
    assert (seen, signal.getsignal(signal.SIGINT)) == ([quit_at_once], before)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        verbs.LazyVerbs()["config"]
        assert (seen[1], signal.getsignal(signal.SIGINT)) == (signal.SIG_IGN, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


def test_settings_from_outside_are_still_checked(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at for every verb, and only then every verb is imported."""
    monkeypatch.setenv("FORETOKEN_EVAL__MAX_TOKENZ", "3")
    done = foretoken("--help")
    assert done.code == 2
    assert "did you mean FORETOKEN_EVAL__MAX_TOKENS?" in done.err
