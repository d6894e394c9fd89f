"""Settings of the file and the environment: the right type or exit 2, and every error says where the value came
from.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[generate]\nmax_tokens = true\n", "max_tokens=True: must be a whole number ([generate] in foretoken.toml)"),
        ('[generate]\nmax_tokens = "4"\n', "max_tokens='4': must be a whole number"),
        ("[generate]\nmax_tokens = 4.0\n", "max_tokens=4.0: must be a whole number"),
        ("[generate]\nmax_tokens = [4]\n", "max_tokens=[4]: must be a whole number"),
        ("[generate]\nmax_tokens = 1979-05-27\n", "must be a whole number"),
        ("[generate.max_tokens]\nx = 1\n", "max_tokens={'x': 1}: must be a whole number"),
        ("[generate.max_tokens]\n", "max_tokens={}: must be a whole number"),
        ("[generate]\ntemperature = nan\n", "temperature=nan: must be a finite number"),
        ("[generate]\ntemperature = inf\n", "temperature=inf: must be a finite number"),
        ("[generate]\ntemperature = true\n", "temperature=True: must be a finite number"),
        (
            "[simulate]\nprice_per_hour = nan\n",
            "price_per_hour=nan: must be a finite number ([simulate] in foretoken.toml)",
        ),
        ("[generate]\nshow = 1\n", "show=1: must be true or false"),
        ('[generate]\nshow = "true"\n', "show='true': must be true or false"),
        ("[generate]\ndrafter = true\n", "drafter=True: must be a text"),
        ('[generate]\ndrafter = ["ngram"]\n', "drafter=['ngram']: must be a text"),
        ('[generate]\nstop = "x"\n', "stop='x': must be a list, each a text"),
        ("[generate]\nstop = [true]\n", "stop=[True]: must be a list, each a text"),
        ("[generate]\ntrace = 1\n", "trace=1: must be a path"),
        ("generate = 5\n", "generate=5: must be a table of settings, [generate], in foretoken.toml"),
        ("[train]\nlm = 5\n", "lm=5: must be a table of settings, [train.lm], in foretoken.toml"),
        ("[nonsense]\n", "nonsense={}: unknown verb of foretoken.toml"),
        ("[generate]\nmax_tokens = 99999999999999999999\n", "max_tokens=99999999999999999999: is too large"),
        ('[generate]\ntrace = "a\\u0000b"\n', "a path cannot hold the character NUL"),
    ],
)
def test_w9_a_wrong_type_in_the_file_is_refused(foretoken: Run, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "foretoken.toml").write_text(text)
    done = foretoken("generate", "--prompt", "x")
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_w9_a_number_may_stand_for_a_text(foretoken: Run, tmp_path: Path, pair: SimpleNamespace) -> None:
    (tmp_path / "foretoken.toml").write_text(
        f'[generate]\ntarget = "{pair.target}"\ndrafter = "ngram"\nnum_draft = 2\nmax_tokens = 4\n'
    )
    assert foretoken("generate", "--prompt-ids", "5,6,7").code == 0


@pytest.mark.parametrize(
    ("content", "message"), [(b"a = " + b"[" * 5000, "nested too deeply"), (b"a = '\n\xff'", "is not UTF-8")]
)
def test_w9_a_file_that_cannot_be_read(foretoken: Run, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "foretoken.toml").write_bytes(content)
    done = foretoken("models")
    assert (done.code, message in done.err) == (4, True), done.err


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GENERATE__MAX_TOKENS", "many", "FORETOKEN_GENERATE__MAX_TOKENS='many': must be a whole number"),
        ("GENERATE__TEMPERATURE", "nan", "FORETOKEN_GENERATE__TEMPERATURE='nan': must be a finite number"),
        ("GENERATE__SHOW", "perhaps", "FORETOKEN_GENERATE__SHOW='perhaps': must be true or false"),
        ("GENERATE__SEED", "", "FORETOKEN_GENERATE__SEED='': must be a whole number"),
        (
            "GENERATE__PROMPT",
            "a\udcff",
            "FORETOKEN_GENERATE__PROMPT='a\\udcff': character 2 is half of a surrogate pair",
        ),
        ("GENERATE__STOP", "[", "FORETOKEN_GENERATE__STOP='[': begins with a bracket and is no JSON list of texts"),
        ("GENERATE__STOP", "[1]", "FORETOKEN_GENERATE__STOP='[1]': must be a list of texts"),
        ("TOML", "\udcff", "FORETOKEN_TOML='\\udcff': character 1 is half of a surrogate pair"),
    ],
)
def test_a_bad_variable_is_named(
    foretoken: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"FORETOKEN_{variable}", value)
    done = foretoken("generate", "--prompt", "x")
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_a_value_that_the_verb_refuses_is_blamed_on_what_set_it(
    foretoken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foretoken.toml").write_text('[generate]\nmax_tokens = -1\nnumerics = "foo"\n')
    assert "set by" not in foretoken("generate", "--prompt", "x", "--numerics", "bar").err
    assert (
        "numerics='foo': choose one of default, strict (set by [generate] in foretoken.toml)"
        in foretoken("generate", "--prompt", "x").err
    )
    done = foretoken("generate", "--prompt", "x", "--numerics", "default")
    assert "max_tokens=-1: must be at least 1 (set by [generate] in foretoken.toml)" in done.err
    monkeypatch.setenv("FORETOKEN_GENERATE__MAX_TOKENS", "-2")
    done = foretoken("generate", "--prompt", "x", "--numerics", "default")
    assert "max_tokens=-2: must be at least 1 (set by FORETOKEN_GENERATE__MAX_TOKENS)" in done.err
    assert "set by" not in foretoken("generate", "--prompt", "x", "--numerics", "default", "--max-tokens", "-3").err


def test_a_list_in_a_variable_may_hold_commas(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops() -> object:
        return json.loads(foretoken("config", "show", "--json").lines[-1])["generate.stop"]["value"]

    for value, expected in (("a,b", ["a", "b"]), ('["a, b", "c"]', ["a, b", "c"]), ('["["]', ["["])):
        monkeypatch.setenv("FORETOKEN_GENERATE__STOP", value)
        assert stops() == expected
