"""`foretoken doctor`."""

from __future__ import annotations

import json
import sys

import pytest

from foretoken.cli import doctor as module
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


def test_without_torch_the_code_is_1(foretoken: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = foretoken("doctor")
    assert done.code == 1
    assert "cannot be imported" in done.out
