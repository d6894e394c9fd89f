"""Slow, obvious twins of what the `tokenizers` library does: splitting by expressions, and SentencePiece's merging."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise

_HAN = ((0x2E80, 0x2FD5), (0x3005, 0x3007), (0x3021, 0x3029), (0x3038, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF))
_HAN_BEYOND = ((0xF900, 0xFAD9), (0x20000, 0x323AF))
_CLASS = re.compile(r"\\p\{(\w+)\}")
_WITHOUT_HAN = "&&[^\\p{Han}]"


@functools.cache
def _by_category() -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = {}
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            found.setdefault(unicodedata.category(chr(code)), []).append(code)
    return found


def _ranges(codes: Sequence[int]) -> str:
    """The inside of a class of Python's `re`."""
    parts: list[str] = []
    start = previous = None
    for code in [*sorted(codes), None]:
        if start is None:
            start = previous = code
        elif previous is not None and code == previous + 1:
            previous = code
        else:
            parts.append(f"\\U{start:08x}-\\U{previous:08x}")
            start = previous = code
    return "".join(parts)


@functools.cache
def _members(name: str, without_han: bool) -> str:
    if name == "Han":
        return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in (*_HAN, *_HAN_BEYOND))
    codes = [code for category, members in _by_category().items() if category.startswith(name) for code in members]
    if without_han:
        han = {code for first, last in (*_HAN, *_HAN_BEYOND) for code in range(first, last + 1)}
        codes = [code for code in codes if code not in han]
    return _ranges(codes)


@functools.cache
def _in_python(expression: str) -> re.Pattern[str]:
    """An expression of Oniguruma for Python's `re`, which has no classes by category."""
    out, inside, without_han = "", False, False
    place = 0
    while place < len(expression):
        rest = expression[place:]
        if rest.startswith(_WITHOUT_HAN):
            place += len(_WITHOUT_HAN)
        elif found := _CLASS.match(rest):
            members = _members(found[1], without_han)
            out += members if inside else f"[{members}]"
            place += found.end()
        elif rest.startswith("\\x{"):
            code, _, _ = rest[3:].partition("}")
            out += f"\\U{int(code, 16):08x}"
            place += len(code) + 4
        elif rest.startswith("\\z"):
            out, place = out + "\\Z", place + 2
        elif rest.startswith("\\"):
            out, place = out + rest[:2], place + 2
        elif rest[0] == "[" and not inside:
            inside, without_han = True, _WITHOUT_HAN in rest[: _end_of_class(rest)]
            out, place = out + "[", place + 1
        elif rest[0] == "[":  # a bracket among others, which Python would warn of
            out, place = out + "\\[", place + 1
        else:
            inside = inside and rest[0] != "]"
            out, place = out + rest[0], place + 1
    return re.compile(out)


def _end_of_class(rest: str) -> int:
    """Where a class that begins with `rest` ends, the classes inside it included."""
    depth = 0
    for place, character in enumerate(rest):
        escaped = place > 0 and rest[place - 1] == "\\"
        depth += (character == "[" and not escaped) - (character == "]" and not escaped)
        if depth == 0:
            return place
    return len(rest)


def split(text: str, expressions: Sequence[str]) -> list[str]:
    """The pieces of `text`: each expression cuts those that the one before left."""
    pieces = [text]
    for expression in expressions:
        pieces = [part for piece in pieces for part in _cut(piece, _in_python(expression)) if part]
    return pieces


def _cut(piece: str, pattern: re.Pattern[str]) -> list[str]:
    parts, end = [], 0
    for found in pattern.finditer(piece):
        parts += [piece[end : found.start()], found[0]]
        end = found.end()
    return [*parts, piece[end:]]


def merge_by_score(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's BPE: of all neighbours that make a token join those of the highest score, the leftmost first."""
    symbols = list(text)
    while True:
        pairs = [
            (-scores[joined], place) for place, joined in enumerate(map("".join, pairwise(symbols))) if joined in scores
        ]
        if not pairs:
            return symbols
        _, place = min(pairs)
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
