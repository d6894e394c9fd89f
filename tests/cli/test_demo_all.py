"""`foretoken demo --all`: a row for every drafter that can run here, and by name why the others cannot."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.cli import demo, demo_all, models
from foretoken.cli.demo_all import DrafterRow, every_drafter, packaged_heads, show_drafters
from foretoken.config import DRAFTERS, PLAIN
from foretoken.draft import open_head
from foretoken.errors import CheckpointError
from foretoken.heads.checkpoint import load_head
from foretoken.heads.kind import head_kind
from foretoken.model.loader import read_config
from foretoken.model.names import model_folder, reference_models
from foretoken.printing.console import Console
from foretoken.registry import HEADS
from tests.cli.conftest import Run
from tests.helpers.tiny_heads import tiny_head

# Two copies of the shipped pair.
WIDE = "hidden=512,intermediate=1280,layers=8,heads=8,kv_heads=4"
WIDE_DRAFT = "hidden=256,intermediate=768,layers=2,heads=4,kv_heads=2"


def test_every_drafter_is_in_the_table_or_left_out_with_a_reason(foretoken: Run) -> None:
    done = foretoken("demo", "--all", "--to", "none", "--repeats", 1, "--max-tokens", 6, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    shown = [row["drafter"] for row in found["rows"]]
    assert shown[0] == PLAIN
    assert sorted([*shown[1:], *found["left_out"]]) == sorted(DRAFTERS)
    assert "beforehand" in found["left_out"]["predicted"]
    for row in found["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["emitted_per_step"] >= 1.0
    assert found["rows"][0]["emitted_per_step"] == 1.0


@pytest.fixture
def heads_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small random heads of the reference target where the package would have trained ones."""
    folder = tmp_path / "reference"
    for name in HEADS:
        tiny_head(folder / name, model_folder("reference:target"), name)
    monkeypatch.setattr("foretoken.model.names._REFERENCE_FOLDER", folder)
    return folder


def test_heads_of_the_package_run_beside_a_widened_target(
    foretoken: Run, heads_in_the_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo._DRAFT_SIZES, WIDE, WIDE_DRAFT)
    monkeypatch.setattr(demo_all, "DRAFTERS", HEADS)
    opened: list[Path] = []
    monkeypatch.setattr(open_head, "head_kind", lambda folder: opened.append(folder) or head_kind(folder))
    done = foretoken("demo", "--all", "--to", WIDE, "--repeats", 1, "--max-tokens", 3, "--num-draft", 2, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.lines[-1])
    assert [row["drafter"] for row in found["rows"]] == [PLAIN, *HEADS]
    assert not found["left_out"]
    assert all(row["identical"] for row in found["rows"])
    assert {folder.name for folder in opened} == set(HEADS)
    assert heads_in_the_package not in {folder.parent for folder in opened}


def test_heads_are_as_wide_as_their_target(heads_in_the_package: Path, tmp_path: Path) -> None:
    widened = packaged_heads(WIDE, tmp_path / "wide")
    target = replace(
        read_config(model_folder("reference:target")),
        hidden_size=512,
        intermediate_size=1280,
        num_heads=8,
        num_kv_heads=4,
    )
    for folder in widened.values():
        load_head(folder, target)
    assert packaged_heads(None, tmp_path) == {name: heads_in_the_package / name for name in HEADS}
    specs, left_out = every_drafter(Path("draft"), widened, 4)
    assert specs["block"].head == str(tmp_path / "wide" / "block")
    assert set(left_out) == {"mtp", "predicted"}


def test_heads_that_are_not_in_the_package_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("foretoken.model.names._REFERENCE_FOLDER", tmp_path)
    assert packaged_heads(None, tmp_path) == {}
    _, left_out = every_drafter(Path("draft"), {}, 4)
    assert left_out["eagle"] == "reference:eagle is not part of this installation"
    with pytest.raises(CheckpointError, match="name the folder of a head"):
        model_folder("reference:eagle")


def test_heads_are_listed_beside_models(heads_in_the_package: Path, foretoken: Run) -> None:
    done = foretoken("models", heads_in_the_package / "eagle", "--json")
    (row,) = json.loads(done.lines[-1])["models"]
    assert (row["family"], row["runs_on"]) == ("eagle head", "beside its target (--head)")


def test_heads_of_the_package_are_no_models(
    heads_in_the_package: Path, foretoken: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.model.names._REFERENCE_FOLDER", heads_in_the_package)
    monkeypatch.setattr(models, "_cached", list)
    assert reference_models() == []
    rows = json.loads(foretoken("models", "--json").lines[-1])["models"]
    assert [(row["model"], row["family"]) for row in rows] == [
        (f"reference:{name}", f"{name} head") for name in sorted(HEADS)
    ]


@pytest.mark.parametrize("width", [40, 120])
def test_the_table_reads_at_every_width(width: int) -> None:
    stream = io.StringIO()
    rows = [DrafterRow(PLAIN, 100.0, 1.0, True), DrafterRow("ngram", 90.25, 1.5, True)]
    rows.append(DrafterRow("draft_model", 1234.5, 3.25, False))
    show_drafters(rows, {"predicted": "it needs the answer beforehand"}, Console(file=stream, width=width))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= width for line in lines[:5])
    assert [line.split() for line in lines[2:5]] == [
        ["none", "100.0", "1.00", "yes"],
        ["draft_model", "1234.5", "3.25", "no"],
        ["ngram", "90.2", "1.50", "yes"],
    ]
    assert "left out: predicted, it needs" in " ".join(lines)


def test_a_single_drafter_beside_all_is_refused(foretoken: Run) -> None:
    done = foretoken("demo", "--all", "--drafter", "ngram")
    assert done.code == 2
    assert "leave --drafter out" in done.err
