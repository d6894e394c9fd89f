"""Tokens that `tokenizer_config.json` and `added_tokens.json` add to a `tokenizer.json`, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from foretoken.errors import CheckpointError
from foretoken.model.fields import read_json, shown

_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_stated_tokens(inner: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add to `inner` the tokens that the files beside it state with their ids, with the flags that they give; a
    special token of the vocabulary that they name is never cut.

    A special token that they name without an id, and that the vocabulary lacks, has no row in the model: it is left
    out.

    Raises:
        CheckpointError: a token that is no token, or that gets another id than they say.
    """
    known = inner.get_added_tokens_decoder()
    for token_id, token in sorted(_stated(folder, settings), key=lambda pair: pair[0]):
        if known.get(token_id) == token:
            continue
        is_new = inner.token_to_id(token.content) is None
        inner.add_tokens([token])
        if is_new and inner.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{folder}: the token {shown(token.content)} is to have the id {token_id}, and gets "
                f"{inner.token_to_id(token.content)} behind the tokens of tokenizer.json: take it out of "
                "tokenizer_config.json or added_tokens.json, or save the tokenizer again"
            )
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    named = [text for text in _specials(settings) if text not in added and inner.token_to_id(text) is not None]
    inner.add_special_tokens(list(dict.fromkeys(named)))


def special_text(value: object) -> str | None:
    """How a special token is spelt, which settings write either plainly or as an object; None for anything else."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _stated(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[int, tokenizers.AddedToken]]:
    """Tokens with their ids: those of `tokenizer_config.json`, or else of `added_tokens.json`."""
    stated, file = settings.get("added_tokens_decoder"), folder / "added_tokens.json"
    named = {special_text(settings.get(name)) for name in _NAMED}
    if isinstance(stated, Mapping):
        for token_id, described in stated.items():
            token = _token(folder, described)
            token.special = token.special or token.content in named
            yield _whole(folder, token_id), token
    elif file.exists():
        specials = set(_specials(settings))
        for text, token_id in read_json(file).items():
            is_special = text in specials
            token = tokenizers.AddedToken(text, normalized=not is_special, special=is_special)
            yield _whole(folder, token_id), token


def _whole(folder: Path, token_id: object) -> int:
    try:
        return int(str(token_id))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {shown(token_id)} is not the id of an added token") from error


def _token(folder: Path, described: object) -> tokenizers.AddedToken:
    text = described.get("content") if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping) or not isinstance(text, str) or not text:
        raise CheckpointError(f"{folder}: {shown(described)} in added_tokens_decoder is not a token")
    return tokenizers.AddedToken(text, **{flag: bool(described[flag]) for flag in _FLAGS if flag in described})


def _specials(settings: Mapping[str, Any]) -> Iterator[str]:
    values = [settings.get(name) for name in _NAMED]
    for name in _LISTED:
        listed = settings.get(name)
        values += listed if isinstance(listed, list) else list(listed.values()) if isinstance(listed, Mapping) else []
    yield from filter(None, map(special_text, values))
