"""Conversations as prompts: the text that the target's chat template makes of them, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from foretoken.bench.workload import Prompt
from foretoken.errors import InputError


class ChatModel(Protocol):
    """The part of `foretoken.LLM` that is used."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds."""
        ...

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The text of a conversation up to where the answer begins."""
        ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Its token ids; the template writes its own begin-of-text token."""
        ...


def with_template(prompts: Sequence[Prompt], model: ChatModel, chat: bool = False) -> tuple[Prompt, ...]:
    """Prompts with messages get the text of the chat template; with `chat` all others do, as a user's message.

    Raises:
        InputError: a target without a chat template, messages that it refuses, or a template whose text the tokenizer
            reads otherwise than the template means.
        CheckpointError: the template is broken.
    """
    return tuple(
        replace(prompt, text=_text(prompt, model)) if prompt.messages or chat else prompt for prompt in prompts
    )


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """The conversation of a prompt; a text is a user's message."""
    pairs = prompt.messages or (("user", prompt.text),)
    return [{"role": role, "content": content} for role, content in pairs]


def _text(prompt: Prompt, model: ChatModel) -> str:
    """The template's text. Where the tokenizer adds the begin-of-text token that the template has written already, the
    text is given without it.
    """
    messages = messages_of(prompt)
    text, ids = model.render_chat(messages), model.encode_chat(messages)
    for cut in (0, *_ends_of_first_tokens(text)):
        if model.encode(text[cut:]) == ids:
            return text[cut:]
    raise InputError("prompts", prompt.name, "as a text it has other tokens than as messages; give it as a text")


def _ends_of_first_tokens(text: str) -> list[int]:
    """Places at which a begin-of-text token such as <s> or <|begin_of_text|> may end."""
    return [place + 1 for place, letter in enumerate(text[:64]) if letter in ">]"]
