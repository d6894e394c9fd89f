"""What was evaluated, as hashes of content: weights, configuration, tokenizer, chat template.

Acceptance belongs to these and to nothing else by name: a hub id may hold other weights tomorrow. Of another engine
only its name, its version and the name of its model are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.errors import StorageError
from foretoken.files import to_json
from foretoken.model.gguf.parts import part_files
from foretoken.model.loader import read_raw_config
from foretoken.text.tokenizer import load_tokenizer

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
# Keys of config.json that differ between copies of the same model.
_NO_IDENTITY = ("_name_or_path", "transformers_version")

PARTS = ("weights", "config", "tokenizer", "template")
BACKEND_PARTS = ("name", "version", "model")


def identity_of(name: str, folder: Path) -> dict[str, str | None]:
    """Name and SHA-256 hashes of a checkpoint's weights, configuration, tokenizer and chat template; None for what it
    does not have.

    Reads every byte of the weights: about a second for each gigabyte.

    Raises:
        StorageError: a file cannot be read.
        CheckpointError: a configuration or tokenizer that is broken.
    """
    raw = read_raw_config(folder)
    config = {key: value for key, value in sorted(raw.items()) if key not in _NO_IDENTITY}
    tokenizer = load_tokenizer(folder)
    inside = part_files(folder) if folder.is_file() else sorted(folder.iterdir())  # GGUF files are all of it
    files = [path for path in inside if path.suffix in _WEIGHTS]
    return {
        "name": name,
        "weights": _of_files(files),
        "config": _of_text(to_json(config)),
        "tokenizer": _of_files([folder / file for file in _TOKENIZER_FILES if (folder / file).is_file()]),
        "template": None if tokenizer is None or tokenizer.chat_template is None else _of_text(tokenizer.chat_template),
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The parts whose hashes differ, with the beginning of both hashes."""
    return _changes(PARTS, before, after, lambda value: "none" if value is None else str(value)[:8])


def backend_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The parts of two backends that differ, each with both values."""
    return _changes(BACKEND_PARTS, before, after, str)


def _changes(
    parts: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any], shown: Callable[[object], str]
) -> list[str]:
    pairs = [(part, before.get(part), after.get(part)) for part in parts]
    return [f"{part} ({shown(old)} -> {shown(new)})" for part, old, new in pairs if old != new]


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _of_files(files: list[Path]) -> str | None:
    """One hash of names and contents; None for no files."""
    if not files:
        return None
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.name}\0".encode())
        try:
            with path.open("rb") as file:
                one = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        whole.update(one.digest())
    return whole.hexdigest()
