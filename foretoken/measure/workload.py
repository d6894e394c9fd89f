"""Prompts to measure with, made from the held-out modules of the standard library.

    code        source cut after a function's `def` line; the answer is its body
    docstring   a `def` line and the first words of its docstring
    edit        a function and the request to rename something in it; the answer mostly copies
    json        the index of a module, cut part-way
    text        prose: a module's docstring, cut part-way

Every prompt carries the text that really follows, so that acceptance can also be measured along real text. The choice
depends on the library alone: no randomness, and nothing from its test suite, which some machines lack.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from foretoken.errors import InputError
from foretoken.train.corpus import HELD_OUT_MODULES, Corpus, Document, documents

MAX_PROMPTS = 100_000  # of a slice: as many requests are made before the first is sent
SLICES: tuple[str, ...] = ("code", "docstring", "edit", "json", "text")
# About 410 tokens at the 3.4 bytes a token that a byte-level BPE of this source reaches.
_PROMPT_CHARS = 1400
_CONTEXT_CHARS = 500
# An answer should be able to fill about 128 tokens, so texts that end sooner are left out where there is a choice.
_ANSWER_CHARS = 450
_DOC_WORDS = 3
_Prompt = TypeVar("_Prompt")
_BEFORE, _AFTER = "\n# Before:\n", "\n# After:\n"


@dataclass(frozen=True)
class Prompt:
    """What is asked, the text that really followed there (None when nobody knows), and what one would expect (for
    `predicted`).

    `messages` are (role, content) pairs of a conversation; `text` is then what a chat template makes of it
    (`prompts.with_template`), and empty before. `max_tokens` and `temperature` are those of a recorded
    request, None where the file says nothing; replays take them, other measurements set their own.
    """

    name: str
    slice: str
    text: str
    continuation: str | None = None
    prediction: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None


def slices(names: Iterable[str] = SLICES, per_slice: int = 4, corpus: Corpus | None = None) -> tuple[Prompt, ...]:
    """`per_slice` prompts of every named slice, each slice once, taken in turn from as many modules as possible.

    `corpus` replaces the running Python's library. The same library gives the same prompts; asking for more keeps the
    first ones.

    Raises:
        InputError: unknown slice, or a library that has no prompt for one.
    """
    own = None if corpus is None else [document for document in corpus.held_out if not _is_test(document.name)]
    prompts: list[Prompt] = []
    for name in dict.fromkeys(names):
        if name not in _MAKERS:
            raise InputError("slices", name, f"choose from {', '.join(SLICES)}")
        chosen = _of_library(name, per_slice) if own is None else _chosen(name, per_slice, own)
        if not chosen:
            remedy = "the standard library here has no text for it; leave it out, or give prompts of your own"
            raise InputError("slices", name, remedy)
        prompts.extend(chosen)
    return tuple(prompts)


def _chosen(name: str, per_slice: int, held_out: Sequence[Document]) -> tuple[Prompt, ...]:
    return tuple(without_trailing_space(prompt) for prompt in _spread(_MAKERS[name](held_out), per_slice))


@functools.cache
def _of_library(name: str, per_slice: int) -> tuple[Prompt, ...]:
    """`_chosen` from the running Python's library, which takes a third of a second to read."""
    return _chosen(name, per_slice, _held_out_documents())


def _held_out_documents() -> list[Document]:
    """Documents of the held-out modules only: reading the whole library would take seconds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Document] = []
    for module in sorted(HELD_OUT_MODULES):
        files = [root / f"{module}.py"] if (root / f"{module}.py").is_file() else sorted((root / module).rglob("*.py"))
        for path in files:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
            found.extend(documents(path.relative_to(root).as_posix(), text))
    return found


def without_trailing_space(prompt: Prompt) -> Prompt:
    """White space at the cut belongs to the answer: tokens hold it together with what follows, so a prompt that ends
    in it is one the model never saw."""
    text = prompt.text.rstrip()
    space = prompt.text[len(text) :]
    prediction = None if prompt.prediction is None else space + prompt.prediction
    return replace(prompt, text=text, continuation=space + (prompt.continuation or ""), prediction=prediction)


def _is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") or part.startswith("test_") for part in Path(name).parts)


def _code(held_out: Sequence[Document]) -> Iterator[Prompt]:
    for document, node in _functions(held_out):
        body = _offset(document.text, node.body[0].lineno)
        if body < _PROMPT_CHARS:
            continue
        name, rest = f"{document.name}:{node.name}", _rest(document.text, body, node)
        yield Prompt(name, "code", _tail(document.text[:body], _PROMPT_CHARS), rest)


def _docstring(held_out: Sequence[Document]) -> Iterator[Prompt]:
    for document, node in _functions(held_out):
        doc = ast.get_docstring(node, clean=False)
        if doc is None or len(doc.split()) < 2 * _DOC_WORDS:
            continue
        words = " ".join(doc.split()[:_DOC_WORDS])
        start = _offset(document.text, min([node.lineno, *(one.lineno for one in node.decorator_list)]))
        at = document.text.find(words, start)
        if at < 0:  # the words stand on several lines, or hold escapes
            continue
        cut = at + len(words)
        text = _tail(document.text[:start], _CONTEXT_CHARS) + document.text[start:cut]
        yield Prompt(f"{document.name}:{node.name}", "docstring", text, _rest(document.text, cut, node))


def _edit(held_out: Sequence[Document]) -> Iterator[Prompt]:
    for number, document in enumerate(held_out):
        head, found, answer = document.text.partition(_AFTER)
        if document.slice == "edit" and found and len(head) <= 2 * _PROMPT_CHARS:
            before = head.partition(_BEFORE)[2] + "\n"
            yield Prompt(f"{document.name}:edit{number}", "edit", head + found, answer, prediction=before)


def _json(held_out: Sequence[Document]) -> Iterator[Prompt]:
    for document in held_out:
        if document.slice != "json":
            continue
        cut = document.text.rfind("\n", 0, min(_PROMPT_CHARS, len(document.text) // 2)) + 1
        if cut > 0:
            yield Prompt(f"{document.name}:index", "json", document.text[:cut], document.text[cut:])


def _text(held_out: Sequence[Document]) -> Iterator[Prompt]:
    for document in held_out:
        tree = _tree(document)
        doc = ast.get_docstring(tree, clean=False) if tree is not None else None
        if doc is None:
            continue
        start = document.text.find(doc)
        cut = start + (doc.rfind(" ", 0, min(_PROMPT_CHARS, len(doc) // 2)))
        if start >= 0 and cut > start:
            yield Prompt(f"{document.name}:prose", "text", document.text[:cut], document.text[cut : start + len(doc)])


_MAKERS: dict[str, Callable[[Sequence[Document]], Iterator[Prompt]]] = {
    "code": _code,
    "docstring": _docstring,
    "edit": _edit,
    "json": _json,
    "text": _text,
}


def _functions(held_out: Sequence[Document]) -> Iterator[tuple[Document, ast.FunctionDef]]:
    for document in held_out:
        tree = _tree(document)
        if tree is not None:
            yield from ((document, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _tree(document: Document) -> ast.Module | None:
    if document.slice != "code":
        return None
    try:
        return ast.parse(document.text)
    except (SyntaxError, ValueError):
        return None


def _offset(text: str, line: int) -> int:
    """Character at which line number `line` (from 1) begins."""
    return sum(len(piece) for piece in text.splitlines(keepends=True)[: line - 1])


def _rest(text: str, start: int, node: ast.FunctionDef) -> str:
    assert node.end_lineno is not None
    return text[start : _offset(text, node.end_lineno + 1)]


def _tail(text: str, limit: int) -> str:
    """The last whole lines of `text`, about `limit` characters of them."""
    cut = max(0, len(text) - limit)
    return text[text.rfind("\n", 0, cut) + 1 :]


def _spread(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts, one module after the other; long answers and then a fixed hash decide the order."""

    def is_short(prompt: Prompt) -> bool:
        return len(prompt.continuation or "") < _ANSWER_CHARS

    ranked = sorted(prompts, key=lambda p: (is_short(p), zlib.crc32(p.name.encode()), p.name))
    return sorted(in_turns(ranked, source_of), key=is_short)[:count]  # stable: keeps the turns


def source_of(prompt: Prompt) -> str:
    """Where a prompt comes from: what stands before the colon of its name."""
    return prompt.name.split(":")[0]


def in_turns(prompts: Iterable[_Prompt], kind: Callable[[_Prompt], str]) -> list[_Prompt]:
    """One prompt of each kind after the other."""
    groups: dict[str, list[_Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(kind(prompt), []).append(prompt)
    return [one for row in itertools.zip_longest(*groups.values()) for one in row if one is not None]
