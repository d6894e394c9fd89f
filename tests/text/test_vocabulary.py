"""What two vocabularies have in common: spellings, special tokens, padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Written
from tokenizers import decoders, models

from foretoken.text.tokenizer import load_tokenizer
from foretoken.text.vocabulary import Side, Twins, differs_in_padding_only, shared_tokens, special_twins, spellings
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.foreign_tokenizers import PROSE, foreign_tokenizer


def side(folder: Path, num_columns: int = 1000) -> Side:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return Side(tokenizer, num_columns, (tokenizer.eos_token_id,))


def listed(folder: Path, tokens: list[str], decoder: object, specials: tuple[str, ...] = ("<end>",)) -> Side:
    """A tokenizer whose vocabulary is a list, with the last special as its end of text."""
    folder.mkdir()
    written = Written(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    written.decoder = decoder
    written.add_special_tokens(list(specials))
    written.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": specials[-1]}))
    return side(folder)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Side]:
    folder = tmp_path_factory.mktemp("sides")
    made = {kind: foreign_tokenizer(folder / kind, kind) for kind in ("sentencepiece", "unigram", "wordpiece")}
    return {kind: side(path) for kind, path in (made | {"bytes": tiny_tokenizer(folder / "bytes", 400, PROSE)}).items()}


def test_equal_text_is_equal_whatever_the_mark_of_a_space(tmp_path: Path) -> None:
    target = listed(tmp_path / "a", ["Ġcat", "cat", "Ċ", "Ã¼", "q", "Ã"], decoders.ByteLevel())
    marks = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    draft = listed(tmp_path / "b", ["<0xC3>", "ü", "cat", "<0x0A>", "▁cat", "<0x71>", "q"], marks)
    # byte tokens give way to real ones; a byte of a character is a token like any other; the ends of text pair up
    assert shared_tokens(target, draft) == {0: 4, 1: 2, 2: 3, 3: 1, 4: 6, 5: 0, 6: 7}


def test_one_spelling_has_one_token(tmp_path: Path) -> None:
    """Two tokens may write the same: the pairs stay one to one, the lowest id counts, and ids beyond the columns do
    not.
    """
    spaces = decoders.Sequence([decoders.Replace("▁", " "), decoders.Replace("_", " "), decoders.Fuse()])
    twice = listed(tmp_path / "a", ["_x", "▁x", "y"], spaces)
    assert spellings(twice) == {b" x": 0, b"y": 2}
    once = listed(tmp_path / "b", ["y", "▁x"], spaces)
    assert shared_tokens(twice, once) == {0: 1, 2: 0, 3: 2}
    assert shared_tokens(twice, Side(once.tokenizer, 1, once.eos_token_ids)) == {2: 0}
    assert shared_tokens(Side(twice.tokenizer, 1, ()), once) == {0: 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [("bytes", "sentencepiece"), ("sentencepiece", "bytes"), ("bytes", "unigram"), ("unigram", "sentencepiece")],
)
def test_shared_tokens_write_the_same(sides: dict[str, Side], one: str, other: str) -> None:
    shared = shared_tokens(sides[one], sides[other])
    assert shared is not None
    assert len(set(shared.values())) == len(shared) > 40
    ours, theirs = sides[one].tokenizer.token_bytes, sides[other].tokenizer.token_bytes
    assert ours is not None
    assert theirs is not None
    ends = sides[one].eos_token_ids[0]
    assert shared[ends] == sides[other].eos_token_ids[0]
    special = sides[one].tokenizer.special_ids
    assert all(ours[token] == theirs[twin] for token, twin in shared.items() if token not in special)
    common = set(spellings(sides[one])) & set(spellings(sides[other]))
    assert len(common) == sum(token not in special for token in shared)


def test_no_spelling_no_shared_tokens(sides: dict[str, Side], tmp_path: Path) -> None:
    """WordPiece puts spaces between tokens when it decodes: what a token writes depends on its neighbours."""
    assert spellings(sides["wordpiece"]) is None
    assert shared_tokens(sides["wordpiece"], sides["bytes"]) is None
    letters, digits = (listed(tmp_path / name, list(name), decoders.ByteLevel()) for name in ("abc", "123"))
    assert shared_tokens(letters, digits) == {}


def test_special_tokens(tmp_path: Path) -> None:
    one = listed(tmp_path / "one", ["a"], decoders.ByteLevel(), ("<user>", "<mine>", "<end>"))
    other = listed(tmp_path / "other", ["b", "a"], decoders.ByteLevel(), ("<user>", "<stop>", "</s>"))
    other = Side(other.tokenizer, 1000, (4, 3))  # two ends, the usual one first
    assert special_twins(one, other) == Twins({1: 2, 3: 4}, {2: 1, 3: 3, 4: 3})
    assert special_twins(other, one) == Twins({2: 1, 3: 3, 4: 3}, {1: 2, 3: 4})


def test_padding(sides: dict[str, Side], tmp_path: Path) -> None:
    tokenizer = sides["bytes"].tokenizer
    size = tokenizer.vocab_size
    assert differs_in_padding_only(Side(tokenizer, size, ()), Side(tokenizer, size + 64, ()))
    assert differs_in_padding_only(Side(tokenizer, size + 3, ()), Side(tokenizer, size, ()))
    assert not differs_in_padding_only(
        Side(tokenizer, size + 3, ()), Side(tokenizer, size - 1, ())
    )  # a real token has no column
    assert not differs_in_padding_only(sides["bytes"], sides["unigram"])
