"""What every test of the command line begins with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.cli import common
from foretoken.cli.app import run
from foretoken.files import CACHE_VARIABLE
from foretoken.model import names
from foretoken.model.packaged import MODELS_VARIABLE

Run = Callable[..., SimpleNamespace]


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, no settings from outside (but this run's own cache and models), and the warnings hook
    back afterwards.
    """
    monkeypatch.chdir(tmp_path)
    kept = (CACHE_VARIABLE, MODELS_VARIABLE)
    for name in [name for name in os.environ if name.startswith("FORETOKEN_") and name not in kept]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("COLUMNS", "250")


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`smollm2`, which verbs take where nothing is named, is the tiny reference target in this process: the command
    line is what is tested. Tests that ask for `smollm2_file` get the real one.
    """
    if "smollm2_file" not in request.fixturenames:
        folder = names.model_folder("reference:target")
        monkeypatch.setattr(names, "fetch_packaged", lambda model, on_bytes=None: folder)
        monkeypatch.setattr(common, "find_packaged", lambda model: folder)
        monkeypatch.setattr("foretoken.model.advised.advised_sampling", lambda name: {})


@pytest.fixture
def foretoken(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command line in this process."""

    def call(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, lines=out.splitlines())

    return call
