"""`foretoken doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretoken.cli import doctor as module
from foretoken.kernels import prebuilt
from foretoken.kernels.prebuilt import INSTRUCTION_SETS
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(module, "_COPY_S", 1e-3)


def test_doctor_says_what_there_is_and_what_was_chosen(foretoken: Run) -> None:
    done = foretoken("doctor")
    assert done.code == 0
    for label in (
        "cores",
        "instructions",
        "neighbours",
        "waiting",
        "threads",
        "disk",
        "compiler",
        "kernels",
        "torch",
        "bandwidth",
    ):
        assert f"\n{label} " in "\n" + done.out


def test_doctor_as_json(foretoken: Run) -> None:
    facts = json.loads(foretoken("doctor", "--json").lines[-1])
    assert 1 <= facts["cores"]["physical"] <= facts["cores"]["allowed"] <= facts["cores"]["logical"]
    assert facts["waiting"]["threads"] in ("sleep", "spin")
    assert facts["torch"]["copy_gb_per_s"] > 0
    assert facts["packages"]["torch"]


@pytest.mark.parametrize("features", [INSTRUCTION_SETS[-1].features, frozenset()])
def test_where_kernels_come_from(
    foretoken: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: frozenset[str]
) -> None:
    assert json.loads(foretoken("doctor", "--json").lines[-1])["kernels"] == "compiled on first use"
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.identity, "flags", lambda *_: features)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = json.loads(foretoken("doctor", "--json").lines[-1])
    assert facts["compiler"] is None
    assert facts["kernels"] == ("in the wheel, for haswell" if features else "torch's slower operations: no compiler")


def test_without_torch_the_code_is_1(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = foretoken("doctor")
    assert done.code == 1
    assert "cannot be imported" in done.out
