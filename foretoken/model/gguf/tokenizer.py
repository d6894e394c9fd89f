"""The tokenizer of a GGUF file, built for the `tokenizers` library: byte-level BPE ("gpt2"), SentencePiece ("llama").

What llama.cpp does to a text (`llama-vocab.cpp`) is done here: splitting by the expression that `tokenizer.ggml.pre`
names, control and user-defined tokens read whole, a BOS in front where the file or its kind says so.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import shown
from foretoken.model.gguf.header import Header

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NO_TOKEN = 2**32 - 1  # how some files write that there is none

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By `tokenizer.ggml.pre`; None is GPT-2's own expression. Those of llama3's kind look whole words up before merging and
# begin every text with a BOS unless the file says otherwise.
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "smollm": None,
}
_LLAMA3_KIND = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_WHOLE_WORDS = (*_LLAMA3_KIND, "tekken")


def read_tokenizer(header: Header) -> tuple[tokenizers.Tokenizer, dict[str, Any]] | None:
    """The tokenizer and its settings as `tokenizer_config.json` would have them; None if the file has none.

    Raises:
        CheckpointError: parts that are missing or do not fit together.
        UnsupportedModelError: a kind, or a way of splitting text, that is not known here.
    """
    fields = header.fields
    kind = fields.text(f"{_PREFIX}model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"{header.path}: {_PREFIX}model={shown(kind)} is not read; gpt2 (byte-level BPE) and llama "
            "(SentencePiece) are"
        )
    tokens = header.texts(f"{_PREFIX}tokens")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or not tokens:
        twice = next((token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id), None)
        found = "is empty" if twice is None else f"has {shown(twice)} twice"
        raise CheckpointError(f"{header.path}: {_PREFIX}tokens {found}")
    split = fields.text(f"{_PREFIX}pre", "gpt-2") or "gpt-2"
    inner = _byte_level(header, vocabulary, split) if kind == "gpt2" else _sentencepiece(header, vocabulary)
    _add_tokens(inner, header, tokens)
    settings = _settings(header, tokens)
    _add_ends(inner, header, settings, vocabulary, begins=kind == "llama" or split in _LLAMA3_KIND)
    return inner, settings


def _byte_level(header: Header, vocabulary: dict[str, int], split: str) -> tokenizers.Tokenizer:
    if split not in SPLITS:
        raise UnsupportedModelError(
            f"{header.path}: {_PREFIX}pre={shown(split)} is a way of splitting text that is not known here; known: "
            f"{', '.join(SPLITS)}"
        )
    pairs: list[tuple[str, str]] = []
    for merge in header.texts(f"{_PREFIX}merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(f"{header.path}: {_PREFIX}merges has {shown(merge)}, which is no pair of tokens")
        pairs.append((left, right))
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=split in _WHOLE_WORDS))
    expression = SPLITS[split]
    if split == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif expression is None:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentencepiece(header: Header, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    unknown = _token_of(header, "unknown", list(vocabulary))
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=_merges(header, vocabulary), unk_token=unknown, byte_fallback=True, fuse_unk=True
        )
    )
    marked = header.fields.flag(f"{_PREFIX}add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", _SPACE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if marked else spaces
    last = [decoders.Strip(" ", 1, 0)] if marked else []
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    return inner


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece joins them: by the score of what they make."""
    scores = header.numbers(f"{_PREFIX}scores")
    if scores is None or len(scores) != len(vocabulary):
        found = "missing" if scores is None else f"{len(scores):,} numbers"
        raise CheckpointError(f"{header.path}: {_PREFIX}scores is {found} for {len(vocabulary):,} tokens")
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        score = float(scores[token_id])
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, -len(left), -len(right), token_id, (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _add_tokens(inner: tokenizers.Tokenizer, header: Header, tokens: list[str]) -> None:
    """Tokens that are read whole: control tokens, which are not shown, and user-defined ones, which are."""
    kinds = header.numbers(f"{_PREFIX}token_type")
    if kinds is None:
        return
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{header.path}: {_PREFIX}token_type has {len(kinds):,} entries for {len(tokens):,} tokens"
        )
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, kind in zip(tokens, kinds.tolist(), strict=True) if kind == wanted and token]
        added = [AddedToken(token, normalized=False, special=special) for token in chosen]
        if special:
            inner.add_special_tokens(added)
        else:
            inner.add_tokens(added)


def _settings(header: Header, tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {name: _token_of(header, key, tokens) for name, key in _SPECIALS.items()}
    template = header.fields.text("tokenizer.chat_template")
    return {name: value for name, value in (settings | {"chat_template": template}).items() if value is not None}


def _token_of(header: Header, name: str, tokens: list[str]) -> str | None:
    key = f"{_PREFIX}{name}_token_id"
    if not header.fields.has(key) or header.metadata[key] == _NO_TOKEN:
        return None
    return tokens[header.fields.whole(key, least=0, most=len(tokens) - 1)]


def _add_ends(
    inner: tokenizers.Tokenizer, header: Header, settings: dict[str, Any], vocabulary: dict[str, int], begins: bool
) -> None:
    """A BOS in front and an EOS behind, where the file wants them."""
    bos = settings.get("bos_token") if header.fields.flag(f"{_PREFIX}add_bos_token", default=begins) else None
    eos = settings.get("eos_token") if header.fields.flag(f"{_PREFIX}add_eos_token") else None
    ends = {token: vocabulary[token] for token in (bos, eos) if token is not None}
    if ends:
        single = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
        special = [
            {"id": name, "ids": [vocabulary[token]], "tokens": [token]}
            for name, token in (("bos", bos), ("eos", eos))
            if token is not None
        ]
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
