"""Every study has a command line and a line in studies/README.md; results carry their origin."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
from pathlib import Path

import pytest

import studies
from studies.command import record, record_file, setting_of

FOLDER = Path(studies.__file__).parent
STUDIES = [module.name for module in pkgutil.iter_modules([str(FOLDER)]) if module.name != "command"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"studies.{name}.__main__" if (FOLDER / name).is_dir() else f"studies.{name}"
    module = importlib.import_module(place)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 0
    assert f"python -m studies.{name}" in capsys.readouterr().out
    assert f"| `{name}` |" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_a_result_carries_command_machine_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["anything", "--rows", "1"])
    found = record("step_cost", {"rows": [1], "ratio": math.nan}, tmp_path / "r.json")
    raw = json.loads((tmp_path / "r.json").read_text())
    assert raw["command"] == found["command"] == "python -m studies.step_cost --rows 1"
    assert raw["rows"] == [1]
    assert raw["ratio"] is None
    assert raw["machine"]["cores"] >= 1
    assert {"date", "versions"} <= set(raw)


def test_a_setting_is_what_json_can_hold() -> None:
    options = argparse.Namespace(model=Path("m"), rows=3, out=Path("x"))
    assert setting_of(options) == {"model": "m", "rows": 3}


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It failed behind minutes of measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=record_file)
    for place in (tmp_path, tmp_path / "no folder" / "a.json"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--out", str(place)])
        assert f"argument --out: cannot write {place}: " in capsys.readouterr().err
    assert parser.parse_args(["--out", str(tmp_path / "a.json")]).out == tmp_path / "a.json"
    assert not (tmp_path / "a.json").exists()
