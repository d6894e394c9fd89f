"""Training text that is present on every machine, the source of Python's standard library, and its token ids.

Three kinds of documents are made from it: modules, small edits (a function, then the same function with a name changed)
and JSON (an index of a module). Held-out modules, and their tests, are never trained on. The tokenizer is the
byte-level BPE of the reference family.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"  # id 0: between documents, and the end of an answer
HELD_OUT_MODULES = frozenset(
    [
        *("calendar", "cmd", "colorsys", "configparser", "csv", "fractions", "graphlib", "heapq", "json"),
        *("nntplib", "queue", "shlex", "statistics", "string", "tempfile", "textwrap", "timeit", "wsgiref"),
    ]
)
# Character tables, not code: they would distort the tokenizer towards digits.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "encodings", "__pycache__", "pydoc_data"})
# Edits and indexes repeat the modules' content, so a few are enough to learn their form.
_EDIT_SHARE, _EDIT_LINES = 0.1, (4, 40)
_INDEX_FUNCTIONS, _INDEX_CLASSES, _INDEX_METHODS = 10, 2, 8
_NEW_NAMES = (
    *("value", "item", "node", "total", "index", "result", "source", "target", "name", "path"),
    *("data", "entry", "key", "handler", "buffer", "record", "text", "state", "limit", "parent"),
)


@dataclass(frozen=True)
class Document:
    """One text with the slice it belongs to (`code`, `edit` or `json`) and the file it was made from."""

    name: str
    slice: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def standard_library(root: Path | None = None) -> Corpus:
    """Read every module under `root` (default: the running Python's library) and split off the held-out ones."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: list[Document] = []
    held_out: list[Document] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(relative.parts):
            continue
        text = _read(path)
        if text:
            (held_out if is_held_out(relative) else train).extend(documents(str(relative), text))
    return Corpus(tuple(train), tuple(held_out))


def is_held_out(relative: Path) -> bool:
    """Whether a library file is a held-out module, lies inside a held-out package, or tests one."""
    names = {part.removesuffix(".py") for part in relative.parts}
    tested = {name.removeprefix("test_") for name in names}
    return not HELD_OUT_MODULES.isdisjoint(names | tested)


def documents(name: str, text: str) -> Iterator[Document]:
    """The module, and the edit and JSON documents made from it."""
    yield Document(name, "code", text)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # the library ships deliberately broken files for its own tests
        return
    rng = random.Random(zlib.crc32(name.encode()))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and rng.random() < _EDIT_SHARE:
            edit = _edit(text, node, rng)
            if edit:
                yield Document(name, "edit", edit)
    index = _index(name, tree)
    if index["functions"] or index["classes"]:
        yield Document(name, "json", f"# Index of {name}\n{json.dumps(index, indent=2)}\n")


def edit_prompt(before: str, old: str, new: str) -> str:
    """The head of an edit document: the request, the code as given, and the line where the answer starts."""
    return f"# Rename `{old}` to `{new}`.\n# Before:\n{before}\n# After:\n"


def _edit(text: str, node: ast.FunctionDef, rng: random.Random) -> str | None:
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    if not _EDIT_LINES[0] <= len(lines) <= _EDIT_LINES[1]:
        return None
    names = sorted({arg.arg for arg in node.args.args if len(arg.arg) > 1} | {node.name})
    old, new = rng.choice(names), rng.choice(_NEW_NAMES)
    before = "\n".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in lines)
    after = re.sub(rf"\b{re.escape(old)}\b", new, before)
    return f"{edit_prompt(before, old, new)}{after}\n"


def _index(name: str, tree: ast.Module) -> dict[str, list[dict[str, object]] | str]:
    functions = [_signature(node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    classes: list[dict[str, object]] = []
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        methods = [_signature(child) for child in node.body if isinstance(child, ast.FunctionDef)][:_INDEX_METHODS]
        bases = [ast.unparse(base) for base in node.bases]
        classes.append({"name": node.name, "line": node.lineno, "bases": bases, "methods": methods})
    return {"module": name, "functions": functions[:_INDEX_FUNCTIONS], "classes": classes[:_INDEX_CLASSES]}


def _signature(node: ast.FunctionDef) -> dict[str, object]:
    doc, args = (ast.get_docstring(node) or "").strip().splitlines(), [arg.arg for arg in node.args.args]
    return {"name": node.name, "line": node.lineno, "args": args, "doc": doc[0] if doc else None}


def _read(path: Path) -> str | None:
    """The file as text; None for the few test files that are deliberately not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE (Sennrich et al. 1508.07909 over bytes, as GPT-2); every byte string has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """`tokenizer_config.json` for transformers and llama.cpp."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> npt.NDArray[np.uint16]:
    """All documents as one array of ids, each followed by the end-of-text token."""
    assert tokenizer.get_vocab_size() <= 1 << 16
    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces: list[npt.NDArray[np.uint16]] = []
    for encoding in tokenizer.encode_batch_fast([document.text for document in documents]):
        pieces.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16)


def windows(ids: npt.NDArray[np.uint16], step: int, batch_size: int, length: int, seed: int) -> npt.NDArray[np.int64]:
    """Batch number `step`: `[batch_size, length + 1]` windows at random positions.

    A function of (seed, step) alone, so a resumed run sees the same batches.
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(ids) - length - 1, size=batch_size)
    return np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int64)
