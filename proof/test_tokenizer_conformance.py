"""llama.cpp's own conformance files: fourteen vocabularies, some fifty texts each, and the ids that the models' own
tokenizers give.

They are in the source distribution of `llama-cpp-python`, which pip fetches once (77 MB) into foretoken's cache
folder. `FORETOKEN_VOCABULARIES` names a folder that has them already.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from foretoken.files import cache_folder
from foretoken.text.detokenizer import Detokenizer
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from foretoken.text.vocabulary import Side, spellings

NAMES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
_PROJECT, _VERSION = "llama-cpp-python", "0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_INSIDE = "/vendor/llama.cpp/models/"
_BETWEEN = "\n__ggml_vocab_test__\n"
_CACHE = cache_folder("vocabularies")  # before the tests get a cache folder of their own


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """The folder of the files."""
    if own := os.environ.get("FORETOKEN_VOCABULARIES"):
        return Path(own)
    folder = _CACHE / f"{_PROJECT}-{_VERSION}"
    if not folder.is_dir():
        _fetch(folder)
    return folder


def _fetch(folder: Path) -> None:
    archive = folder.parent / f"{_PROJECT.replace('-', '_')}-{_VERSION}.tar.gz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", _PROJECT]
    ran = subprocess.run(
        [*pip, "--dest", str(archive.parent), f"{_PROJECT}=={_VERSION}"], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        pytest.skip(f"pip cannot fetch {_PROJECT} {_VERSION}: {ran.stderr.strip()[-300:]}")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == _SHA256
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir()
    with tarfile.open(archive) as source:
        for member in source:
            _, inside, name = member.name.partition(_INSIDE)
            if inside and member.isfile() and name.startswith("ggml-vocab-") and "/" not in name:
                member.name = name
                source.extract(member, partial, filter="data")
    archive.unlink()
    partial.rename(folder)


def _cases(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split(_BETWEEN)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_bytes().decode().removesuffix("\n").split("\n")
    if not texts[-1]:  # behind the last mark
        texts.pop()
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_ids_and_the_text_back(vocabularies: Path, name: str) -> None:
    tokenizer = load_tokenizer(vocabularies / f"ggml-vocab-{name}.gguf")
    assert tokenizer is not None
    cases = _cases(vocabularies, name)
    assert len(cases) >= 45
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.encode_plain(text) == ids
        assert tokenizer.decode(ids) == text
        assert _streamed(tokenizer, ids) == text
        assert _bytes(tokenizer, ids) == text.encode()
    _check_spellings(tokenizer, [text for text, _ in cases])


def _streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join(stream.push(token_id) for token_id in ids) + stream.flush()


def _bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """What a grammar reads: the bytes of each token, without the space that SentencePiece puts in front."""
    assert tokenizer.token_bytes is not None
    written = b"".join(tokenizer.token_bytes[token_id] for token_id in ids)
    return written.removeprefix(b" ") if tokenizer.drops_first_space else written


def _check_spellings(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Whatever byte a text needs can be written: a draft of another vocabulary finds a token for it."""
    side = Side(tokenizer, max(tokenizer.vocabulary.values()) + 1, ())
    spelt = spellings(side)
    assert spelt is not None
    assert {bytes([byte]) for text in texts for byte in text.encode()} <= spelt.keys()
