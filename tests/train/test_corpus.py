"""The corpus: deterministic, and held-out modules never reach training."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretoken.train import recipes
from foretoken.train.corpus import (
    END_OF_TEXT,
    HELD_OUT_MODULES,
    documents,
    edit_prompt,
    encode,
    is_held_out,
    standard_library,
    train_tokenizer,
    windows,
)

MODULE = '''"""A module."""


def first(alpha, beta):
    """Add."""
    total = alpha + beta
    return total


class Box:
    """Holds."""

    def get(self, name):
        return name
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of four modules, one held out together with its test."""
    for name in (
        "alpha.py",
        "heapq.py",
        "test/test_heapq.py",
        "json/decoder.py",
        "encodings/cp437.py",
        "site-packages/other.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(MODULE)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    return tmp_path


def test_processes_that_make_the_corpus_at_once_do_not_disturb_each_other(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torchrun do; the other one is done here while the first has written and not yet renamed."""
    folder, write, is_other = tmp_path / "run", np.savez, iter([False])
    monkeypatch.setattr(recipes, "standard_library", lambda: standard_library(library))

    def written(path: Path, **arrays: Any) -> None:
        write(path, **arrays)
        if not next(is_other, True):
            with monkeypatch.context() as patched:
                patched.setattr(os, "getpid", lambda: 12)
                recipes.prepare(folder)

    monkeypatch.setattr(np, "savez", written)
    _, data = recipes.prepare(folder)
    assert len(data.train) > 0
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.npz", "tokenizer.json"]


def test_held_out_modules_and_their_tests_stay_out(library: Path) -> None:
    corpus = standard_library(library)
    assert {d.name for d in corpus.train} == {"alpha.py"}
    assert {d.name for d in corpus.held_out} == {"heapq.py", "test/test_heapq.py", "json/decoder.py"}


@pytest.mark.parametrize(
    ("path", "held_out"),
    [("heapq.py", True), ("json/tool.py", True), ("test/test_csv.py", True), ("csvlike.py", False)],
)
def test_is_held_out(path: str, held_out: bool) -> None:
    assert is_held_out(Path(path)) is held_out
    assert "csv" in HELD_OUT_MODULES


def test_documents_are_the_same_every_time() -> None:
    assert list(documents("a.py", MODULE)) == list(documents("a.py", MODULE))


def test_an_edit_renames_and_changes_nothing_else() -> None:
    edits = [d for number in range(40) for d in documents(f"m{number}.py", MODULE) if d.slice == "edit"]
    assert edits
    for edit in edits:
        head, after = edit.text.split("# After:\n")
        request, before = head.split("# Before:\n")
        old, new = request.split("`")[1], request.split("`")[3]
        assert edit_prompt(before.rstrip("\n"), old, new) == f"{head}# After:\n"
        assert before.count(old) == after.count(new) - before.count(new)
        ast.parse(after)


def test_tokens_round_trip_and_documents_end() -> None:
    tokenizer = train_tokenizer([MODULE * 3], 300)
    docs = list(documents("a.py", MODULE + "# naïve 猫 😀\n"))
    ids = encode(tokenizer, docs)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end == 0
    assert (ids == end).sum() == len(docs)
    assert tokenizer.decode([int(i) for i in ids if i != end]) == "".join(d.text for d in docs)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    tokenizer = train_tokenizer([MODULE * 3], 300)
    ids = encode(tokenizer, list(documents("a.py", MODULE * 20)))
    one, again, other = (windows(ids, step, 4, 16, seed=7) for step in (3, 3, 4))
    assert (one == again).all()
    assert (one != other).any()
    assert one.shape == (4, 17)
