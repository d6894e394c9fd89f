"""Settings: flags before the environment, before the file, before defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.cli.test_cli import expected

__all__ = ["expected"]  # fixtures


def origins(foretoken: Run) -> dict[str, dict[str, object]]:
    done = foretoken("config", "show", "--origin", "--json")
    assert done.code == 0, done.err
    return json.loads(done.lines[-1])


def test_who_wins(
    foretoken: Run, pair: SimpleNamespace, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_tokens(*flags: object) -> int:
        return len(
            foretoken("generate", "-t", pair.target, "--prompt-ids", "5,6,7", "--ignore-eos", *flags).out.split(",")
        )

    assert num_tokens() == 128
    assert origins(foretoken)["generate.max_tokens"] == {"value": 128, "origin": "default"}
    (tmp_path / "foretoken.toml").write_text("[generate]\nmax_tokens = 4\n")
    assert num_tokens() == 4
    assert origins(foretoken)["generate.max_tokens"] == {"value": 4, "origin": "foretoken.toml"}
    monkeypatch.setenv("FORETOKEN_GENERATE__MAX_TOKENS", "3")
    assert num_tokens() == 3
    assert origins(foretoken)["generate.max_tokens"] == {"value": "3", "origin": "FORETOKEN_GENERATE__MAX_TOKENS"}
    assert num_tokens("--max-tokens", 2) == 2


def test_every_kind_of_option_can_come_from_a_file(
    foretoken: Run, pair: SimpleNamespace, expected: list[int], tmp_path: Path
) -> None:
    """Text, number, switch, and a nested verb."""
    (tmp_path / "foretoken.toml").write_text(
        f'[generate]\ntarget = "{pair.target}"\nprompt_ids = "5,6,7"\nmax_tokens = 12\ndrafter = "ngram"\nshow = true\n[train.lm]\nseed = 7\n'  # noqa: E501
    )
    done = foretoken("generate")
    assert done.code == 0
    assert "by token, a group per step:" in done.out
    assert origins(foretoken)["train lm.seed"] == {"value": 7, "origin": "foretoken.toml"}


def test_lists_and_switches_from_the_environment(
    foretoken: Run, text_pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["generate", "-t", text_pair.target, "-p", "the list", "--max-tokens", 20]
    monkeypatch.setenv("FORETOKEN_GENERATE__IGNORE_EOS", "true")
    text = foretoken(*common).out.rstrip("\n")
    monkeypatch.setenv("FORETOKEN_GENERATE__STOP", f"never this,{text[5:7]}")
    assert foretoken(*common).out == text[: text.find(text[5:7])] + "\n"


def test_another_file_by_name(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "foretoken.toml").write_text("[generate]\nmax_tokens = 4\n")
    (tmp_path / "other.toml").write_text("[generate]\nmax_tokens = 5\n")
    monkeypatch.setenv("FORETOKEN_TOML", str(tmp_path / "other.toml"))
    assert origins(foretoken)["generate.max_tokens"] == {"value": 5, "origin": str(tmp_path / "other.toml")}


def test_the_table_of_settings(foretoken: Run) -> None:
    assert re.search(r"generate +max_tokens +128 +default", foretoken("config", "show", "--origin").out)
    assert "default" not in foretoken("config", "show").out.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (
            "[generate]\nmax_token = 4\n",
            2,
            "max_token=4: unknown setting of [generate] in foretoken.toml; did you mean 'max_tokens'?",
        ),
        (
            "[generat]\nmax_tokens = 4\n",
            2,
            "generat={'max_tokens': 4}: unknown verb of foretoken.toml; did you mean 'generate'?",
        ),
        ("[train.lm]\nsed = 4\n", 2, "sed=4: unknown setting of [train.lm] in foretoken.toml; did you mean 'seed'?"),
        ("max_tokens = 4\n", 2, "max_tokens=4: unknown setting of foretoken.toml"),
        ("[generate\n", 4, "cannot read foretoken.toml"),
        (b"[generate]\ntarget = '\xff'\n", 4, "cannot read foretoken.toml"),
    ],
    ids=["key", "verb", "nested", "no verb", "syntax", "bytes"],
)
def test_bad_settings_file(foretoken: Run, tmp_path: Path, text: str | bytes, code: int, message: str) -> None:
    """Refused whatever verb runs: a setting that does nothing is a trap."""
    (tmp_path / "foretoken.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    done = foretoken("models", tmp_path)
    assert (done.code, done.out) == (code, "")
    assert message in done.err


def test_a_settings_file_that_is_not_there(foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named on purpose, so its absence is an error."""
    monkeypatch.setenv("FORETOKEN_TOML", str(tmp_path / "nowhere.toml"))
    done = foretoken("models", tmp_path)
    assert done.code == 4
    assert "nowhere.toml" in done.err


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("FORETOKEN_GENERATE__MAX_TOKEN", "did you mean FORETOKEN_GENERATE__MAX_TOKENS?"),
        ("FORETOKEN_" + "Q" * 40, "unset it"),
    ],
)
def test_an_unknown_variable_is_refused(
    foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, hint: str
) -> None:
    monkeypatch.setenv(variable, "1")
    done = foretoken("models", tmp_path)
    assert done.code == 2
    assert variable in done.err
    assert hint in done.err


def test_a_bad_value_in_a_file_is_a_usage_error(foretoken: Run, pair: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "foretoken.toml").write_text('[generate]\nmax_tokens = "many"\n')
    done = foretoken("generate", "-t", pair.target, "--prompt-ids", "1")
    assert (done.code, done.out) == (2, "")
    assert "max_tokens='many': must be a whole number ([generate] in foretoken.toml)" in done.err
