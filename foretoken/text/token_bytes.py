"""What single tokens write, in bytes, as the decoder of a tokenizer joins them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The visible character that byte-level vocabularies write for each byte (GPT-2), reversed."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


@functools.lru_cache(maxsize=1 << 16)
def byte_level(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary writes."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def literal_ids(decoder: Mapping[str, Any], added: Mapping[int, str]) -> frozenset[int]:
    """Added tokens that stand for their own text, though a byte-level decoder would read them as bytes.

    DeepSeek's vocabularies have such tokens, "ö" among them: the decoder alone would write one broken byte for it.
    """
    if decoder.get("type") != "ByteLevel":
        return frozenset()
    return frozenset(token_id for token_id, text in added.items() if byte_level(text) != text.encode())


def token_writer(decoder: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """What a decoder of `tokenizer.json` makes of one token inside a text; None if that depends on others."""
    steps = list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return byte_level
    spaces: list[tuple[str, str]] = []  # text that stands for other text, a mark for the space above all
    # What comes behind this step works on the whole text.
    joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    for step in steps[:joined]:
        if step.get("type") == "Metaspace":
            spaces.append((step["replacement"], " "))
        elif step.get("type") == "Replace" and "String" in step["pattern"]:
            spaces.append((step["pattern"]["String"], step["content"]))
        elif step.get("type") != "ByteFallback":
            return None
    if any(kind != "Strip" for kind in kinds[joined + 1 :]):
        return None

    def write(token: str) -> bytes:
        if "ByteFallback" in kinds and BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for mark, text in spaces:
            token = token.replace(mark, text)
        return token.encode()

    return write
