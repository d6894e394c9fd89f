"""Tokens that stand beside a tokenizer.json are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import CheckpointError
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import END_OF_TEXT, tiny_tokenizer

_TEXTS = ("def the return of self in a class and the list is empty\n" * 20, "return self class\n" * 20)
_PROBE = "def <zz>the return<|endoftext|> of self  <zz> in class <yy> returning"


def _token(text: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": text,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        **({"special": True} | flags),
    }


def _folder(folder: Path, settings: dict[str, Any], added: dict[str, int] | None = None) -> Path:
    tiny_tokenizer(folder, texts=_TEXTS)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def _loaded(folder: Path) -> Tokenizer:
    found = load_tokenizer(folder)
    assert found is not None
    return found


def _next_id(folder: Path) -> int:
    return max(_loaded(tiny_tokenizer(folder, texts=_TEXTS)).vocabulary.values()) + 1


@pytest.mark.parametrize(
    ("described", "added", "named"),
    [
        ([_token("<zz>")], (), {}),
        ([_token("<zz>", special=False)], (), {}),
        ([_token("<zz>", lstrip=True, rstrip=True), _token("<yy>", special=False)], (), {}),
        ([], ("<zz>", "<yy>"), {}),
        ([], ("<zz>", "<yy>"), {"pad_token": "<zz>"}),
        ([], (), {"eos_token": "return"}),
        ([], (), {"additional_special_tokens": ["return"]}),
        ([], (), {"extra_special_tokens": {"image_token": "return"}}),
    ],
)
def test_tokens_beside_the_file_are_those_of_transformers(
    tmp_path: Path, described: list[dict[str, Any]], added: tuple[str, ...], named: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    first = _next_id(tmp_path / "plain")
    stated: dict[str, Any] = {str(first + place): one for place, one in enumerate(described)}
    decoder = {"added_tokens_decoder": stated | {"0": _token(END_OF_TEXT)}} if described else {}
    in_file = {text: first + place for place, text in enumerate(added)} or None
    folder = _folder(tmp_path / "own", decoder | named, in_file)
    found, theirs = _loaded(folder), AutoTokenizer.from_pretrained(folder)
    ids = found.encode(_PROBE)
    assert ids == theirs.encode(_PROBE)
    assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    plain = _loaded(tmp_path / "plain")
    assert (ids, found.special_ids) != (plain.encode(_PROBE), plain.special_ids)


def test_a_named_end_stays_special_whatever_its_flag_says(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"added_tokens_decoder": {"0": _token(END_OF_TEXT, special=False)}})
    assert _loaded(folder).special_ids == {0}


def test_a_token_that_gets_another_id_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"added_tokens_decoder": {"4000": _token("<zz>")}})
    with pytest.raises(CheckpointError, match=r"the token '<zz>' is to have the id 4000, and gets \d+ behind"):
        load_tokenizer(folder)


@pytest.mark.parametrize("stated", [{"300": "<zz>"}, {"300": {"content": 3}}, {"many": _token("<zz>")}])
def test_what_is_no_token_is_named(tmp_path: Path, stated: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"added token|added_tokens_decoder"):
        load_tokenizer(_folder(tmp_path, {"added_tokens_decoder": stated}))
