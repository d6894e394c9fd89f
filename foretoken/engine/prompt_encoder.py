"""How texts and conversations become token ids of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.engine.prompts import Conversation, Message, as_conversation, check_length, text_parts
from foretoken.errors import InputError, MismatchError
from foretoken.params import check_text
from foretoken.text.added_tokens import QuotedSpecials
from foretoken.text.chat_template import takes_parts, takes_tools
from foretoken.text.tokenizer import Tokenizer

_MEDIA = re.compile(r"image|audio|video")  # in the type of a part: image_url, input_audio
# A prompt that has more times as many tokens as the context is refused without a count of all of them.
_MANY_TIMES = 4
_AT_SEAM = 8  # tokens that a part of a conversation may have fewer beside the part in front of it
_HEAD = "\n"  # in front of a part of a text, which SentencePiece would otherwise begin with a space of its own


class PromptEncoder:
    """Turns texts and conversations into token ids of the model in `folder`. May be used from several threads.

    `context`, where it is given, is the number of tokens that the result must stay below: what is many times longer is
    refused before all of it is encoded, which would take minutes that nothing can cut short.
    """

    def __init__(self, tokenizer: Tokenizer | None, folder: Path, vocab_size: int) -> None:
        self._tokenizer, self._folder, self._vocab_size = tokenizer, folder, vocab_size

    def encode(self, text: object, context: int | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds.

        Raises:
            InputError: not a text, or the folder has no tokenizer.
            MismatchError: the tokenizer writes a token that the model does not have.
            ContextLengthError: `context` tokens or more.
        """
        if not isinstance(text, str):
            raise InputError("text", text, "must be a text")
        self._check_minimum("prompt", text, context)
        ids = self._encode("prompt", text, add_special_tokens)
        if context is not None:
            check_length(len(ids), context)
        return ids

    def render_chat(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation, up to where the answer begins. For a template that
        reads no parts, contents in parts of text are joined by line ends.

        Raises:
            InputError: no conversation, no chat template, pictures or the like, tools that the template does not take,
                or messages that it refuses.
            CheckpointError: the template is broken.
        """
        conversation = as_conversation(messages)
        tokenizer = self._of_field("messages", conversation)
        _check_media(conversation)
        with _shallow():
            _check_template_values(tools, options)
            source = (tokenizer.tool_template if tools else tokenizer.chat_template) or ""
            if tools and source and not takes_tools(source):
                remedy = f"the chat template of {self._folder} takes no tools; leave them out, or name a file with one"
                raise InputError("tools", list(tools), f"{remedy} that does (chat_template)")
            if not takes_parts(source):
                conversation = [_joined(message) for message in conversation]
            return tokenizer.apply_chat_template(conversation, tools=tools, options=options)

    def encode_chat(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        context: int | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes its own begin-of-text token, so none is added. Special tokens
        in the messages and tools are text: only the template writes special tokens.

        Raises:
            InputError, CheckpointError, MismatchError, ContextLengthError: see `render_chat`, `encode`.
        """
        specials = () if self._tokenizer is None else self._tokenizer.special_texts
        with _shallow():
            quoted = QuotedSpecials(as_conversation(messages), specials, tools)
        text = self.render_chat(quoted.messages, quoted.tools, options)
        ids: list[int] = []
        for part, is_plain in quoted.parts(text):
            if context is not None and len(ids) > _MANY_TIMES * context:
                check_length(len(ids), context, is_minimum=True)
            self._check_minimum("messages", part, context, is_plain)
            ids += self._encode_part(part, is_plain, is_first=not ids)
        if context is not None:
            check_length(len(ids), context)
        return ids

    def _encode_part(self, part: str, is_plain: bool, is_first: bool) -> list[int]:
        """Token ids of a part of a rendered conversation. Behind another part it is encoded with a line end in front,
        which is cut off again unless it has become a part of another token.
        """
        if not is_first and self._tokenizer is not None and self._tokenizer.drops_first_space:
            begun = self._encode("messages", _HEAD, add_special_tokens=False)
            found = self._encode("messages", _HEAD + part, add_special_tokens=False, is_plain=is_plain)
            if found[: len(begun)] == begun:
                return found[len(begun) :]
        return self._encode("messages", part, add_special_tokens=False, is_plain=is_plain)

    def encode_plain(self, field: str, text: str, context: int | None = None) -> list[int]:
        """Token ids of a text in which nothing is a special token; `field` names it in errors.

        Raises:
            InputError, MismatchError, ContextLengthError: see `encode`.
        """
        self._check_minimum(field, text, context, is_plain=True)
        return self._encode(field, text, add_special_tokens=False, is_plain=True)

    def _check_minimum(self, field: str, text: str, context: int | None, is_plain: bool = False) -> None:
        """Refuse a text that cannot stay below `context` tokens, as far as that is known without encoding it."""
        if context is not None:
            _check_text(field, text)
            least = self._of_field(field, text).min_num_tokens(text, context + _AT_SEAM, is_plain) - _AT_SEAM
            check_length(least, context, is_minimum=True)

    def _encode(self, field: str, text: object, add_special_tokens: bool, is_plain: bool = False) -> list[int]:
        text = _check_text(field, text)
        tokenizer = self._of_field(field, text)
        ids = tokenizer.encode_plain(text) if is_plain else tokenizer.encode(text, add_special_tokens)
        beyond = next((token for token in ids if token >= self._vocab_size), None)
        if beyond is not None:
            raise MismatchError(
                f"the tokenizer in {self._folder} writes token {beyond} ({tokenizer.token(beyond)!r}), and the model's "
                f"vocabulary ends at {self._vocab_size - 1}"
            )
        return ids

    def _of_field(self, field: str, value: object) -> Tokenizer:
        if self._tokenizer is None:
            raise InputError(field, value, f"{self._folder} has no tokenizer; give token ids instead of text")
        return self._tokenizer


def _check_template_values(tools: object, options: object) -> None:
    """Refuse tools that are no list of mappings, and options that are no mapping."""
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        example = '{"type": "function", "function": {"name": "now"}}'
        raise InputError("tools", tools, f"give a list of mappings, such as [{example}], or leave them out")
    if options is not None and not isinstance(options, Mapping):
        raise InputError("options", options, 'give a mapping, such as {"enable_thinking": False}, or leave them out')


def _check_text(field: str, text: object) -> str:
    """`text`, which is one, and can be encoded in UTF-8."""
    if not isinstance(text, str):
        raise InputError(field, text, "must be a text")
    check_text(field, text)
    return text


def _check_media(messages: Conversation) -> None:
    """Refuse what is no text: a template writes a token for it, and there would be nothing behind it."""
    for place, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and _MEDIA.search(kind):
                remedy = "is not taken: models read text only here; leave it out"
                raise InputError(f"messages.{place}.content", f"a part of type {kind}", remedy)


def _joined(message: Message) -> Message:
    """A message whose content in parts is one text, where all parts are texts."""
    texts = text_parts(message.get("content"))
    return message if texts is None else {**message, "content": "\n".join(texts)}


@contextmanager
def _shallow() -> Iterator[None]:
    """Refuse what is nested so deeply that it cannot be walked through."""
    try:
        yield
    except RecursionError:
        remedy = "they, or the tools beside them, are nested too deeply; flatten them"
        raise InputError("messages", "objects inside of objects", remedy) from None
