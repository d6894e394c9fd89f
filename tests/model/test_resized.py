"""A model with other columns can do all that the model itself can, and shows it in every version of Python."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.model.interface import EarlyExitModel, LanguageModel, PrefixModel, Segment, TwinModel
from foretoken.model.open import open_model
from foretoken.model.resized import resized
from tests.helpers.checkpoints import tiny_checkpoint, token_ids

COLUMNS = 97


@pytest.fixture(scope="module", params=["llama", "opt"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Our own decoder, and a model that transformers runs."""
    folder = tmp_path_factory.mktemp(request.param)
    return open_model(tiny_checkpoint(folder, request.param, vocab_size=COLUMNS), "float32", "cpu", 256)


def members(protocol: type) -> set[str]:
    """What a protocol asks for, inherited things too."""
    return {
        name
        for kind in protocol.__mro__
        if kind.__module__.startswith("foretoken")
        for name in vars(kind)
        if not name.startswith("_")
    }


def has_all(thing: object, protocol: type) -> bool:
    """What `isinstance` asks from Python 3.12 on: attributes that are there without running any code."""
    missing = object()
    return all(inspect.getattr_static(thing, name, missing) is not missing for name in members(protocol))


@pytest.mark.parametrize("columns", [COLUMNS - 7, COLUMNS + 7])
def test_it_can_do_what_the_model_can(model: LanguageModel, columns: int) -> None:
    """Prefixes are shared behind other columns exactly where the model shares them; nothing is promised that it cannot
    do.
    """
    other = resized(model, columns)
    assert has_all(other, LanguageModel)
    assert has_all(other, PrefixModel) == isinstance(other, PrefixModel) == isinstance(model, PrefixModel)
    assert has_all(other, TwinModel)
    assert not isinstance(other, EarlyExitModel)


@pytest.mark.parametrize("columns", [COLUMNS - 7, COLUMNS + 7])
def test_what_it_says_is_what_the_model_says(model: LanguageModel, columns: int) -> None:
    """Every plain fact but the columns; sequences opened, run, cut and closed through it are the model's."""
    other = resized(model, columns)
    assert other.vocab_size == columns
    for name in members(LanguageModel) - {"vocab_size"}:
        value = getattr(model, name)
        assert callable(value) or getattr(other, name) == value
    tokens = token_ids(40, COLUMNS - 7)
    other.open(1)
    assert other.reserve(1, 40)
    logits = other.forward(torch.tensor(tokens), [Segment(1, 40)]).logits
    other.commit(1, 40)
    assert logits.shape == (1, columns)
    assert other.length(1) == model.length(1) == 40
    assert other.footprint_tokens(40) == model.footprint_tokens(40)
    assert other.num_free_tokens() == model.num_free_tokens() < model.capacity_tokens
    if isinstance(other, PrefixModel) and isinstance(model, PrefixModel):
        other.publish(1, tokens, str(columns))
        assert other.shared_tokens(tokens, str(columns)) == model.shared_tokens(tokens, str(columns)) == 32
        other.open(2)
        assert other.adopt(2, tokens, str(columns)) == 32
        assert other.prefix_stats == model.prefix_stats
        other.close(2)
    other.rollback(1, 5)
    assert other.length(1) == 5
    other.close(1)


def test_the_same_columns_need_nothing(model: LanguageModel) -> None:
    assert resized(model, COLUMNS) is model


def test_no_class_forwards_unseen() -> None:
    """Protocols are asked with `isinstance` all over the package, which finds nothing that only `__getattr__` answers
    for.
    """
    package = Path(foretoken.__file__).parent
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py"))
    classes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [
        kind.name
        for kind in classes
        if any(isinstance(item, ast.FunctionDef) and item.name == "__getattr__" for item in kind.body)
    ]
