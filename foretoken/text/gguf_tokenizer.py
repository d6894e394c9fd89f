"""The tokenizer of a GGUF file, built for the `tokenizers` library: byte-level BPE ("gpt2"), SentencePiece ("llama"),
BPE over text with a mark for the space ("gemma4").

What llama.cpp does to a text (`llama-vocab.cpp`) is done here: splitting by the expressions that `tokenizer.ggml.pre`
names, special tokens read whole, a BOS in front where the file or its kind says so. As in llama.cpp the text is not
normalised: what is encoded is what decoding gives back.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.model.fields import shown
from foretoken.model.gguf.header import Header
from foretoken.model.gguf.special_tokens import NO_TOKEN, PREFIX, TokenType, read_tokens, special_tokens, token_types
from foretoken.text.gguf_pre_tokenizers import ENCODERS, PRE_TOKENIZERS, PreTokenizer

_SPACE = "\u2581"
_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where the file of a "llama" vocabulary names none
_OTHER_KINDS = {
    "bert": "WordPiece, of models that write no text",
    "t5": "unigram SentencePiece",
    "rwkv": "RWKV's trie of byte strings",
    "plamo2": "PLaMo 2's table of suffixes",
    "whitespace": "words, of models that write no text",
    "hybriddna": "DNA k-mers",
}


def read_tokenizer(header: Header) -> tuple[tokenizers.Tokenizer, dict[str, Any]] | None:
    """The tokenizer and its settings as `tokenizer_config.json` would have them; None if the file has none.

    Raises:
        CheckpointError: parts that are missing or do not fit together.
        UnsupportedModelError: a kind, or a way of splitting text, that is not known here.
    """
    kind = header.fields.text(f"{PREFIX}model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    _check_kind(header, kind)
    tokens = read_tokens(header)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or not tokens:
        twice = next((token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id), None)
        found = "is empty" if twice is None else f"has {shown(twice)} twice"
        raise CheckpointError(f"{header.path}: {PREFIX}tokens {found}")
    settings = _settings(header, tokens, _SENTENCEPIECE_IDS if kind == "llama" else {})
    if kind == "llama":
        inner, begins = _sentencepiece(header, vocabulary, settings.get("unk_token")), True
    else:
        pre = _pre_tokenizer(header, kind)
        inner, begins = _bpe(header, vocabulary, pre, settings.get("unk_token")), pre.add_bos
    _add_tokens(inner, header, tokens)
    # Files of Gemma 4 say that there is no BOS, and the model needs one.
    begins = (kind == "gemma4") or header.fields.flag(f"{PREFIX}add_bos_token", default=begins)
    _add_ends(inner, header, settings, vocabulary, begins)
    return inner, settings


def _check_kind(header: Header, kind: str) -> None:
    if kind in ("gpt2", "llama", "gemma4"):
        return
    about = f" ({_OTHER_KINDS[kind]})" if kind in _OTHER_KINDS else ""
    raise UnsupportedModelError(
        f"{header.path}: {PREFIX}model={shown(kind)}{about} is not read; gpt2 (byte-level BPE), llama (SentencePiece) "
        "and gemma4 are: take the model's safetensors checkpoint, which has a tokenizer file of its own"
    )


def _pre_tokenizer(header: Header, kind: str) -> PreTokenizer:
    """What `tokenizer.ggml.pre` names; files older than that key are split as llama.cpp splits them."""
    name = "gemma4" if kind == "gemma4" else header.fields.text(f"{PREFIX}pre") or "default"
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    if name in ENCODERS:
        raise UnsupportedModelError(
            f"{header.path}: {PREFIX}pre={shown(name)} belongs to models that encode text for a search and write none: "
            "take a causal language model"
        )
    raise UnsupportedModelError(
        f"{header.path}: {PREFIX}pre={shown(name)} is a way of splitting text that is not known here; known: "
        f"{', '.join(PRE_TOKENIZERS)}"
    )


def _bpe(header: Header, vocabulary: dict[str, int], pre: PreTokenizer, unknown: str | None) -> tokenizers.Tokenizer:
    pairs = _merges(header)
    if not pre.byte_level:
        inner = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, byte_fallback=True, fuse_unk=True)
        )
        _mark_spaces(inner, prefix=False)
        return inner
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.ignore_merges))
    inner.pre_tokenizer = split_of(pre)
    inner.decoder = decoders.ByteLevel()
    return inner


def split_of(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The splits in turn, then each byte as the character that byte-level vocabularies write for it."""
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.splits]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _merges(header: Header) -> list[tuple[str, str]]:
    if not header.fields.has(f"{PREFIX}merges"):
        raise CheckpointError(f"{header.path}: {PREFIX}merges is missing: convert the model again")
    pairs: list[tuple[str, str]] = []
    for merge in header.texts(f"{PREFIX}merges"):
        space = merge.find(" ", 1)  # a token may begin with a space
        if space < 0 or space == len(merge) - 1:
            raise CheckpointError(f"{header.path}: {PREFIX}merges has {shown(merge)}, which is no pair of tokens")
        pairs.append((merge[:space], merge[space + 1 :]))
    return pairs


def _sentencepiece(header: Header, vocabulary: dict[str, int], unknown: str | None) -> tokenizers.Tokenizer:
    if header.fields.flag(f"{PREFIX}remove_extra_whitespaces"):
        raise UnsupportedModelError(
            f"{header.path}: {PREFIX}remove_extra_whitespaces=True is read by unigram vocabularies only; take the "
            "model's safetensors checkpoint"
        )
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_scored_merges(header, vocabulary),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    _mark_spaces(inner, prefix=header.fields.flag(f"{PREFIX}add_space_prefix", default=True))
    return inner


def _mark_spaces(inner: tokenizers.Tokenizer, prefix: bool) -> None:
    """A mark for each space, and with `prefix` one in front of the text, which decoding takes away."""
    spaces = normalizers.Replace(" ", _SPACE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    inner.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


_UNMERGED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)


def _scored_merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece joins them: by the score of what they make.

    A file that llama.cpp made of a `tokenizer.json` has the same score for every token; there the ids have the order.
    """
    scores = header.numbers(f"{PREFIX}scores")
    if scores is None or len(scores) != len(vocabulary):
        found = "missing" if scores is None else f"{len(scores):,} numbers"
        raise CheckpointError(f"{header.path}: {PREFIX}scores is {found} for {len(vocabulary):,} tokens")
    types = token_types(header, read_tokens(header))
    is_flat = len({float(scores[token_id]) for token_id in vocabulary.values() if types[token_id] not in _UNMERGED}) < 2
    ranked: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for token, token_id in vocabulary.items():
        if types[token_id] in _UNMERGED:
            continue  # no text is joined to such a token
        score = -float(token_id) if is_flat else float(scores[token_id])
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, -len(left), -len(right), token_id, (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _add_tokens(inner: tokenizers.Tokenizer, header: Header, tokens: list[str]) -> None:
    special = special_tokens(header, tokens)
    for hidden, add in ((True, inner.add_special_tokens), (False, inner.add_tokens)):
        add(
            [
                AddedToken(token.text, normalized=False, special=hidden, rstrip=token.rstrip)
                for token in special
                if token.hidden == hidden
            ]
        )


def _settings(header: Header, tokens: list[str], defaults: dict[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        name: _token_of(header, role, tokens, defaults.get(role)) for name, role in _SPECIALS.items()
    }
    template: str | list[dict[str, str]] | None = header.fields.text("tokenizer.chat_template")
    for_tools = header.fields.text("tokenizer.chat_template.tool_use")
    if isinstance(template, str) and for_tools is not None:
        template = [{"name": "default", "template": template}, {"name": "tool_use", "template": for_tools}]
    return {name: value for name, value in (settings | {"chat_template": template}).items() if value is not None}


def _token_of(header: Header, role: str, tokens: list[str], default: int | None) -> str | None:
    key = f"{PREFIX}{role}_token_id"
    if not header.fields.has(key):
        return None if default is None or default >= len(tokens) else tokens[default]
    if header.metadata[key] == NO_TOKEN:
        return None
    return tokens[header.fields.whole(key, least=0, most=len(tokens) - 1)]


def _add_ends(
    inner: tokenizers.Tokenizer, header: Header, settings: dict[str, Any], vocabulary: dict[str, int], begins: bool
) -> None:
    """A BOS in front and an EOS behind, where the file wants them."""
    bos = settings.get("bos_token") if begins else None
    eos = settings.get("eos_token") if header.fields.flag(f"{PREFIX}add_eos_token") else None
    ends = {token: vocabulary[token] for token in (bos, eos) if token is not None}
    if ends:
        single = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
        special = [
            {"id": name, "ids": [vocabulary[token]], "tokens": [token]}
            for name, token in (("bos", bos), ("eos", eos))
            if token is not None
        ]
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
