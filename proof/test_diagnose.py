"""`foretoken diagnose` names each planted fault, and says of a healthy head that nothing is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foretoken
from foretoken.measure.report import Report
from tests.helpers.diagnosed import BOS, OPENING, TAPS, edit_config, make_head_for, make_target, prompts_file

HUGE = 3e4  # a factor that float32 holds, and float16 does not


HEADS: dict[str, dict[str, Any]] = {  # how each head is trained; those that a fault needs half as long
    "healthy": {},
    "flagged": {"norm_before_residual": True, "steps": 150},
    "with_bos": {"mode": BOS, "steps": 150},
    "with_template": {"mode": OPENING, "steps": 150},
    "short": {"length": 16, "steps": 150},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its prompts, and later the heads for it that tests ask for."""
    root = tmp_path_factory.mktemp("world")
    make_target(root / "target")
    prompts_file(root / "prompts.jsonl")
    return root


def head_of(world: Path, name: str) -> Path:
    """One of `HEADS`, trained when it is first asked for: two processes may have a part of the tests each."""
    folder = world / name
    return folder if folder.exists() else make_head_for(world / "target", folder, **HEADS[name])


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def shift_table(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] -= 1
    tensors["t2d"] = tensors["t2d"].roll(-1)


def overflow(tensors: dict[str, torch.Tensor]) -> None:
    tensors["midlayer.mlp.up_proj.weight"] *= HUGE
    tensors["midlayer.mlp.down_proj.weight"] /= HUGE


def diagnosed(world: Path, head: Path, target: str = "target", **options: Any) -> Report:
    given = {"prompts": world / "prompts.jsonl", "max_tokens": 48} | options
    return foretoken.diagnose(str(world / target), str(head), **given)


def planted(world: Path, tmp_path: Path, name: str, **fields: Any) -> Path:
    head = Path(shutil.copytree(head_of(world, name), tmp_path / "head"))
    edit_config(head, **fields)
    return head


def test_a_healthy_head_has_nothing_wrong(world: Path) -> None:
    report = diagnosed(world, head_of(world, "healthy"))
    assert report.results["cause"] is None, report.verdict
    assert report.results["rows"][0]["accepted_per_draft"] > 1.5
    assert "accepts" in report.verdict


@pytest.mark.parametrize(
    ("cause", "name", "fields"),
    [
        ("layer taps", "healthy", {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS]}),
        ("norm flag", "flagged", {"norm_before_residual": False}),
        ("rope base", "healthy", {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
    ],
)
def test_a_wrong_config_is_named(world: Path, tmp_path: Path, cause: str, name: str, fields: dict[str, Any]) -> None:
    report = diagnosed(world, planted(world, tmp_path, name, **fields))
    assert report.results["cause"] == cause, report.verdict


def test_a_table_that_is_off_by_one_is_named(world: Path, tmp_path: Path) -> None:
    head = planted(world, tmp_path, "healthy")
    edit_weights(head, shift_table)
    assert diagnosed(world, head).results["cause"] == "d2t table"


def test_an_overflow_of_half_precision_is_named(world: Path, tmp_path: Path) -> None:
    head = planted(world, tmp_path, "healthy")
    edit_weights(head, overflow)
    report = diagnosed(world, head, dtype="float16")
    assert report.results["cause"] == "half precision", report.verdict
    assert "not finite in float16" in report.results["remedy"]


@pytest.mark.parametrize(("cause", "name"), [("BOS", "with_bos"), ("chat template", "with_template")])
def test_a_prompt_that_is_written_otherwise_is_named(world: Path, cause: str, name: str) -> None:
    report = diagnosed(world, head_of(world, name))
    assert report.results["cause"] == cause, report.verdict


def test_a_length_beyond_that_of_training_is_named(world: Path) -> None:
    report = diagnosed(world, head_of(world, "short"), max_tokens=110)
    assert report.results["cause"] == "training length", report.verdict


def test_a_temperature_is_named(world: Path) -> None:
    report = diagnosed(world, head_of(world, "healthy"), temperature=2.0)
    assert report.results["cause"] == "temperature", report.verdict


def test_another_target_is_named(world: Path, tmp_path: Path) -> None:
    make_target(tmp_path / "other", language=1, steps=20)  # what it says need not be the language
    report = diagnosed(world, head_of(world, "healthy"), target=str(tmp_path / "other"))
    assert report.results["cause"] == "other target", report.verdict
