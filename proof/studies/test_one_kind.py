"""Documents of one kind as a file of answers, which training takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.errors import InputError
from foretoken.train.answers import answered_data
from foretoken.train.corpus import Corpus, Document
from studies.one_kind import MIN_TOKENS, write

CORPUS = Corpus(
    (
        *(Document(f"{n}.py", "code", f"def number_{n}(value):\n    return value + {n}\n" * 12) for n in range(8)),
        Document("x.py", "json", '{"name": "x"}' * 40),
        Document("short.py", "code", "x = 1\n"),
    ),
    (),
)


def test_training_takes_what_was_written(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "code.jsonl"
    num_tokens = write(str(text_pair.target), "code", 1_000_000, out, CORPUS)
    lines = out.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + 8, "a document that is too short is left out"
    assert num_tokens > 8 * MIN_TOKENS
    data = answered_data(out, Path(text_pair.target), 4096, 0.2)
    assert data.train.num_wanted + data.held_out.num_wanted == num_tokens - 8 * 8


def test_a_bound_and_a_kind_that_is_not_there(text_pair: SimpleNamespace, tmp_path: Path) -> None:
    assert write(str(text_pair.target), "code", 1, tmp_path / "one.jsonl", CORPUS) > 1
    assert len((tmp_path / "one.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    with pytest.raises(InputError, match="kind='prose': choose from code, json"):
        write(str(text_pair.target), "prose", 1, tmp_path / "none.jsonl", CORPUS)
