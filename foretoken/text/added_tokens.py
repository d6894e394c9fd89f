"""Tokens that `tokenizer_config.json` and `added_tokens.json` add to a `tokenizer.json`, as transformers does; and
special tokens that messages spell, which stay text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from foretoken.errors import CheckpointError, InputError
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


_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them for such use, no text has them


class QuotedSpecials:
    """A conversation and its tools in which every special token that they spell has a mark behind its first character.

    `messages` and `tools` go through the template; `parts` finds the marked places in the rendered text.

    Raises:
        InputError: the conversation contains every mark there is.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_texts: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.messages, self.tools = messages, tools
        self._marked: re.Pattern[str] | None = None
        longest_first = sorted(special_texts, key=len, reverse=True)
        texts = list(_texts([messages, tools]))
        if not any(special in text for text in texts for special in longest_first):
            return
        mark = next((mark for mark in _MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InputError("messages", "every noncharacter of Unicode", "leave them out; no text has them")
        self._mark = mark
        spelt = re.compile("|".join(map(re.escape, longest_first)))
        self.messages, self.tools = _changed([messages, tools], lambda text: spelt.sub(self._quoted, text))
        self._marked = re.compile("|".join(re.escape(text[:1] + mark + text[1:]) for text in longest_first))

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The rendered text in parts, and whether each is plain text that spells a special token."""
        if self._marked is None:
            yield text, False
            return
        begin = 0
        for found in self._marked.finditer(text):
            if found.start() > begin:
                yield text[begin : found.start()], False
            yield found.group().replace(self._mark, ""), True
            begin = found.end()
        if begin < len(text):
            yield text[begin:], False

    def _quoted(self, found: re.Match[str]) -> str:
        text = found.group()
        return text[:1] + self._mark + text[1:]


def _texts(value: object) -> Iterator[str]:
    """All texts in a JSON value, names of fields among them: a template may write these too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (key,) if isinstance(key, str) else ()
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _changed(value: object, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - a JSON value of the same shape
    """`value` with `change` applied to all that `_texts` finds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item, change) for item in value]
    return value
