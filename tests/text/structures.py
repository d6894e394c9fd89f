"""Tokenizers and models for tests of structured answers, with the bytes of every token by an independent rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.config import SamplingParams
from foretoken.model.names import model_folder
from foretoken.text.structure import Structure, StructureCompiler
from foretoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.text.test_tokenizer import _byte_tokens, byte_fallback

NUM_PADDING = 9  # columns of the model behind its tokenizer's tokens


def reference_tokenizer() -> Tokenizer:
    loaded = load_tokenizer(model_folder("reference:target"))
    assert loaded is not None
    return loaded


def tiny(folder: Path) -> Tokenizer:
    loaded = load_tokenizer(
        tiny_tokenizer(
            folder,
            420,
            texts=("return self.für 猫猫 😀😀 yes nobody " * 20, '{"name": "value", "none": [1, 2, 3]}\n' * 20),
        )
    )
    assert loaded is not None
    return loaded


KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "tiny": tiny,
    "byte_fallback": byte_fallback,
    "reference": lambda folder: reference_tokenizer(),
}


class Model:
    """Columns and end tokens of a model, and the bytes of its tokens by an independent rule."""

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self.tokenizer = tokenizer
        self.size = tokenizer.vocab_size + NUM_PADDING
        assert tokenizer.eos_token_id is not None
        self.end_ids = (tokenizer.eos_token_id, tokenizer.vocab_size + 4)  # the second one has no text at all
        self.compiler = StructureCompiler(tokenizer, self.size, self.end_ids)
        back = {_byte_tokens(bytes([byte]))[0]: byte for byte in range(256)}
        self.bytes: dict[int, bytes] = {}
        for token, token_id in tokenizer.vocabulary.items():
            if token_id in tokenizer.special_ids:
                continue
            if kind != "byte_fallback":
                self.bytes[token_id] = bytes(back[character] for character in token)
            elif re.fullmatch(r"<0x..>", token):
                self.bytes[token_id] = bytes.fromhex(token[3:5])
            else:
                self.bytes[token_id] = token.replace("▁", " ").encode()
        self.ids_of = {raw: token_id for token_id, raw in self.bytes.items()}

    def spell(self, text: str | bytes) -> list[int]:
        """One token for every byte."""
        return [self.ids_of[bytes([byte])] for byte in (text.encode() if isinstance(text, str) else text)]

    def text(self, ids: list[int] | tuple[int, ...]) -> bytes:
        return b"".join(self.bytes[token_id] for token_id in ids)

    def make(self, **given: Any) -> Structure:
        made = self.compiler.compile(SamplingParams(**given))
        assert made is not None
        return made
