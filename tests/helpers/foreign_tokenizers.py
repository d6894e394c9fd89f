"""Tokenizers of other kinds than `tiny_tokenizer`'s, and text with all that they differ in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

PROSE = (
    "the cat sat on the mat and the dog ran to the house, then it was late.\n" * 6,
    "for i in range(10):\n    print(i)\n\treturn self.name\n" * 6,
    "für naïve Größe 猫 ist 😀 \U0001f468\u200d\U0001f469 schön\n" * 6,
)


def foreign_tokenizer(folder: Path, kind: str, vocab_size: int = 400) -> Path:
    """Write a tokenizer of another kind than `tiny_tokenizer`'s: "sentencepiece" (marked spaces, byte tokens, a BOS),
    "unigram" or "wordpiece" (whose decoder does more than join tokens)."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<unk>", "<s>", "</s>"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    common: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": specials, "show_progress": False}
    described: dict[str, Any]
    if kind == "sentencepiece":
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(**(common | {"special_tokens": specials + byte_tokens}), limit_alphabet=40)
        tokenizer.train_from_iterator([word for text in PROSE for word in text.split()], trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        described = json.loads(tokenizer.to_str())  # byte tokens are ordinary ones, as in the files that people use
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in specials]
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        tokenizer.train_from_iterator(PROSE, trainers.UnigramTrainer(**common, unk_token="<unk>"))
        described = json.loads(tokenizer.to_str())
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        tokenizer.train_from_iterator(PROSE, trainers.WordPieceTrainer(**common))
        described = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
