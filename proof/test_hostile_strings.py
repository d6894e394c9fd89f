"""C1, C5: every hostile string through every verb and printed place, at every width, in every encoding: whole, and
harmless.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from tests.helpers.hostile_scenes import SCENES, play
from tests.helpers.hostile_strings import ENCODINGS, MEGABYTE, STRINGS, WIDTHS, check, check_real_process

pytestmark = pytest.mark.filterwarnings("default::UserWarning")  # one scene is a warning


@pytest.fixture(autouse=True)
def clean_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, and the warnings hook back afterwards."""
    for name in [name for name in os.environ if name.startswith("FORETOKEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("scene", SCENES)
def test_every_verb_prints_every_string_whole(
    scene: str, encoding: str, width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product."""
    for name, text in STRINGS.items():
        played, done = play(monkeypatch, tmp_path, scene, text, width, encoding)
        try:
            check(played, done, text, width, encoding)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}\n{done.out[:3000]}\n{done.err[:3000]}") from error


@pytest.mark.parametrize("width", [40, None])
@pytest.mark.parametrize("scene", SCENES)
def test_every_verb_prints_a_megabyte(
    scene: str, width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole where it is what was asked for; an error leaves out the middle."""
    played, done = play(monkeypatch, tmp_path, scene, MEGABYTE, width, "utf-8")
    check(played, done, MEGABYTE, width, "utf-8")


@pytest.mark.parametrize("name", ["C", "C.UTF-8", "latin-1"])
def test_real_processes(name: str, tmp_path: Path) -> None:
    """In the locales that a container and a desktop have, and in an 8-bit encoding; ASCII is in `tests/`."""
    check_real_process(name, tmp_path)
