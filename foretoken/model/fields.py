"""Checked reading of a checkpoint's JSON: every refusal names the file, the key and the value.

A checkpoint is written by somebody else. Its files may be of any size and nesting and its values of any type; what is
read here is bounded before it is used. `null` means that the key is absent, as it does in transformers' own files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from foretoken.errors import CheckpointError, UnsupportedModelError

# Published configurations have some 10 KB and a depth of 5, the longest weight indices 20 MB.
_MAX_BYTES = 1 << 28
_MAX_DEPTH = 64
# Far beyond every published size; products of a few of them still fit into 64 bits or fail the comparison with the
# file.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000  # bounds what is made for each of them before the number is compared with the files
_MAX_NUMBER = 1e30

HEAD_NOTE = "target.json"  # beside a trained head, what it was made for; other engines read no file of this name
ADAPTER_CONFIG = "adapter_config.json"  # what PEFT writes beside a LoRA adapter and its like
# Files of a checkpoint folder that are opened here or by transformers.
_READ_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: missing, unreadable, too large, nested too deeply, not an object, or with a key twice.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes; at most {_MAX_BYTES:,} are read")
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _object(path, pairs))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: this is not a Hugging Face model folder") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested more than {_MAX_DEPTH} levels deep") from error
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    _check_depth(path, content)
    return content


def _object(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"{path} has the key {shown(name)} twice")
        found[name] = value
    return found


def _check_depth(path: Path, content: dict[str, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise CheckpointError(f"{path} is nested more than {_MAX_DEPTH} levels deep")


def refuse_adapter(folder: Path) -> None:
    """Refuse the folder of an adapter (LoRA and its like), also one that lies beside the weights of a model, where
    transformers would apply it.

    Raises:
        UnsupportedModelError: names the kind of the adapter, its model and what to do.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return
    raw = read_json(path)
    base = raw.get("base_model_name_or_path")
    raise UnsupportedModelError(
        f"{folder} holds an adapter ({ADAPTER_CONFIG}, peft_type={shown(raw.get('peft_type'))}) of the model "
        f"{shown(base)}, and adapters are not applied here: merge it and give the folder of the result (peft: "
        f"PeftModel.from_pretrained(model, {str(folder)!r}).merge_and_unload().save_pretrained(out)); where the "
        f"weights hold it already, remove {ADAPTER_CONFIG}"
    )


def check_links(folder: Path) -> None:
    """Refuse files of a checkpoint folder that are links to somewhere else; the hub's snapshots, which link to its
    blobs, are fine.

    Raises:
        CheckpointError: names the link and where it leads.
    """
    if folder.is_file():  # a GGUF file: a name the user gave, wherever it leads
        return
    try:
        links = [
            path
            for path in folder.iterdir()
            if path.suffix in _READ_SUFFIXES and path.is_symlink() and not path.is_dir()
        ]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for link in links:
        checkpoint_file(folder, link.name)


def checkpoint_file(folder: Path, name: object) -> Path:
    """The file `name` of a checkpoint; `name` may come from one of its files.

    Raises:
        CheckpointError: no file name, or one that leads out of the folder.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError(f"{folder}: {shown(name)} is not the name of a file")
    path = folder / name
    try:
        target, root = path.resolve(), folder.resolve()
        path.exists()  # asks the system, which `resolve` does not always do
    except (OSError, RuntimeError, ValueError) as error:  # a ring of links, a name that is too long
        raise CheckpointError(f"{folder}: {shown(name)} cannot be opened: {error}") from error
    # The hub keeps models--x/snapshots/<revision>/file as a link to models--x/blobs/<hash>.
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    is_plain = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not is_plain or not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(
            f"{shown(name)} in {folder} leads out of the folder, to {target}: put the file itself into the folder"
        )
    return path


def shown(value: object, limit: int = 80) -> str:
    """`repr` cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Fields:
    """The values of one JSON object, each read with its type and bounds; `where` names the object in errors."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def refusal(self, key: str, wanted: str) -> CheckpointError:
        """The error for the value of `key`."""
        if key not in self.raw:
            return CheckpointError(f"{self.where} has no {key!r}; it must be {wanted}")
        return CheckpointError(f"{self.where}: {key}={shown(self.raw[key])} must be {wanted}")

    def has(self, key: str) -> bool:
        """Whether `key` has a value other than null."""
        return self.raw.get(key) is not None

    def whole(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number that has to be there."""
        value = self.raw.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(key, f"a whole number from {least:,} to {most:,}")
        return value

    def whole_or(self, key: str, default: int, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number, or `default`."""
        return self.whole(key, least, most) if self.has(key) else default

    def number(self, key: str, above: float = 0.0, zero: bool = False) -> float:
        """A finite number greater than `above`, or 0 where `zero` allows it, that has to be there."""
        value = self.raw.get(key)
        if _is_number(value, above) or (zero and _is_number(value, -1.0) and value == 0):
            return float(value)
        raise self.refusal(key, f"a number greater than {above:g}" + (", or 0" if zero else ""))

    def number_or(self, key: str, default: float, above: float = 0.0, zero: bool = False) -> float:
        """The same, or `default`."""
        return self.number(key, above, zero) if self.has(key) else default

    def check_share(self, key: str) -> None:
        """Refuse a value that is no number from 0 to 1, null among them; the key may be absent."""
        value = self.raw.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.refusal(key, "a number from 0 to 1, or absent")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers greater than 0 that has to be there."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count or not all(_is_number(item, 0.0) for item in value):
            raise self.refusal(key, f"a list of {count:,} numbers greater than 0")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string, or `default`."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "a string")
        return default if value is None else value

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(key, "a list of strings")
        return tuple(value)

    def fields(self, key: str) -> Fields | None:
        """An object of its own, or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def token_ids(self, key: str, vocab_size: int | None) -> tuple[int, ...]:
        """One token id or a list of them, below `vocab_size` if that is known; none if the key is absent."""
        value = self.raw.get(key)
        if value is None:
            return ()
        ids: Sequence[Any] = value if isinstance(value, list) else (value,)
        below = MAX_SIZE if vocab_size is None else vocab_size
        if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < below for one in ids):
            where = "" if vocab_size is None else f" below the vocabulary's {vocab_size:,}"
            raise self.refusal(key, f"a token id{where}, or a list of them")
        return tuple(ids)


def _is_number(value: object, above: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= _MAX_NUMBER
