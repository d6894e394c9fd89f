"""Texts and functions that lie on every machine with Python: what prompts about code and documents are made of."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from foretoken.train.corpus import is_held_out

_FUNCTION_LINES = (4, 30)
_PASSAGE_CHARACTERS = (300, 1200)
_MAX_PASSAGES_PER_SOURCE = 12


@dataclass(frozen=True)
class SourceFunction:
    """A function of the standard library: its whole text, and what stands before its body."""

    name: str
    text: str
    stub: str
    summary: str  # first line of its docstring


@dataclass(frozen=True)
class Passage:
    """A paragraph or two of documentation, and what it is about."""

    subject: str
    text: str


def library_functions() -> Iterator[SourceFunction]:
    """Functions with a docstring, module by module; held-out modules are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "encodings", "lib2to3", "idlelib"} & set(relative.parts):
            continue
        if is_held_out(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):  # files that are broken on purpose
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (found := _function(node, lines)) is not None:
                yield found


def _function(node: ast.FunctionDef, lines: list[str]) -> SourceFunction | None:
    docstring = ast.get_docstring(node)
    if not docstring or node.end_lineno is None or len(node.body) < 2:
        return None
    whole = lines[node.lineno - 1 : node.end_lineno]
    if not _FUNCTION_LINES[0] <= len(whole) <= _FUNCTION_LINES[1]:
        return None
    head = lines[node.lineno - 1 : node.body[0].end_lineno]
    indent = node.col_offset
    text, stub = ("\n".join(line[indent:] for line in part) for part in (whole, head))
    return SourceFunction(node.name, text, stub, docstring.strip().splitlines()[0].strip())


def passages() -> Iterator[Passage]:
    """Paragraphs of module docstrings of the standard library and of the descriptions of installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if {"site-packages", "test", "tests", "encodings"} & set(relative.parts) or is_held_out(relative):
            continue
        try:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        yield from _passages(path.stem, docstring or "")
    for one in sorted(distributions(), key=lambda found: found.name):
        _, _, body = (one.read_text("METADATA") or "").partition("\n\n")
        yield from _passages(one.name, body)


def _passages(subject: str, text: str) -> Iterator[Passage]:
    """Runs of paragraphs of prose, each as long as a passage is."""
    collected: list[str] = []
    made = 0
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        if not _is_prose(words):
            continue
        collected.append(words)
        size = sum(map(len, collected))
        if size > _PASSAGE_CHARACTERS[1]:
            collected = []
        elif size >= _PASSAGE_CHARACTERS[0]:
            yield Passage(subject, "\n\n".join(collected))
            collected, made = [], made + 1
            if made == _MAX_PASSAGES_PER_SOURCE:
                return


def _is_prose(words: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in words)
    return len(words) > 80 and letters > 0.88 * len(words)
