"""`model/interface.py` is all that the rest of the package knows of a model."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.kv.pool import bytes_per_token
from foretoken.model import hf, paged, resized, strict
from foretoken.model.decoder import Decoder
from foretoken.model.interface import EarlyExitModel, PrefixModel, TwinModel
from foretoken.model.open import open_model
from tests.helpers.checkpoints import tiny_checkpoint, variant

PACKAGE = Path(foretoken.__file__).resolve().parent
# Folders whose modules work on weights: what they train or write is our decoder.
_HOLDS_WEIGHTS = ("model", "heads", "parallel", "train")
_MODULES = ("paged", "strict", "hf", "decoder", "early", "layers", "attention")


@functools.cache
def concrete_classes() -> frozenset[str]:
    """Names of the classes that implement a language model, or are part of one."""
    return frozenset(
        name
        for module in (paged, strict, hf, resized)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if hasattr(kind, "forward") and hasattr(kind, "commit") and not getattr(kind, "_is_protocol", False)
    ) | {Decoder.__name__}


def knows_a_concrete_model(tree: ast.Module) -> list[str]:
    """Imports of modules that implement models, and concrete classes that are named anywhere, also as a text."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            parts = node.module.split(".")
            names = [*parts, *(alias.name for alias in node.names)] if parts[:2] == ["foretoken", "model"] else []
            found += [name for name in names[2:] if name in _MODULES or name in concrete_classes()]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith(tuple(f"foretoken.model.{m}" for m in _MODULES))]
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [name] if name in concrete_classes() else []
        elif isinstance(node, ast.Constant) and node.value in concrete_classes():
            found.append(str(node.value))
    return found


def test_nothing_outside_model_knows_a_concrete_model_class() -> None:
    assert {"PagedModel", "StrictModel", "TransformersModel", "Decoder"} <= concrete_classes()
    knowing = {
        str(path.relative_to(PACKAGE)): found
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in _HOLDS_WEIGHTS
        if (found := knows_a_concrete_model(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert knowing == {}


@pytest.mark.parametrize(
    "source",
    [
        "from foretoken.model.paged import PagedModel",
        "from foretoken.model import strict",
        "import foretoken.model.hf as other",
        "def f(x): return type(x).__name__ == 'TransformersModel'",
        "isinstance(target, model.PagedModel)",
    ],
)
def test_the_test_sees_it(source: str) -> None:
    assert knows_a_concrete_model(ast.parse(source))
    assert not knows_a_concrete_model(ast.parse("from foretoken.model.interface import PrefixModel"))


def test_what_callers_ask_of_a_model_instead_of_its_class(tmp_path: Path) -> None:
    folder = variant(tmp_path / "llama", "llama")
    default, exact = (open_model(folder, numerics=numerics, cache_tokens=64) for numerics in ("default", "strict"))
    other = open_model(tiny_checkpoint(tmp_path / "gpt2", "gpt2"), cache_tokens=64)
    cut = resized.resized(default, 64)
    assert [model.numerics for model in (default, exact, other, cut)] == ["default", "strict", "default", "default"]
    size = bytes_per_token(3, 2, 12, torch.float32)
    assert [model.kv_bytes_per_token for model in (default, exact, other, cut)] == [size, size, 0, size]
    for kind, expected in (
        (PrefixModel, [True, True, False, True]),
        (TwinModel, [True, True, False, True]),
        (EarlyExitModel, [True, True, False, False]),
    ):
        assert [isinstance(model, kind) for model in (default, exact, other, cut)] == expected
