"""What a caller may ask with: texts, token ids, conversations; and how they become token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.engine.lengths import check_length
from foretoken.errors import InputError, MismatchError
from foretoken.params import check_text
from foretoken.text.chat_template import takes_parts, takes_tools
from foretoken.text.tokenizer import Tokenizer

TOOLS_REMEDY = "tools and tool calls are not replayed; leave these requests out"
_TOOL_ROLES = ("tool", "function")
_MEDIA = re.compile(r"image|audio|video")  # in the type of a part: image_url, input_audio
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call")  # of a message

# A prompt that has more times as many tokens as the context is refused without a count of all of them.
_MANY_TIMES = 4
_AT_SEAM = 8  # tokens that a part of a conversation may have fewer beside the part in front of it
_HEAD = "\n"  # in front of a part of a text, which SentencePiece would otherwise begin with a space of its own
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them for such use, no text has them

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]


def as_prompts(prompts: object) -> list[Prompt]:
    """One text, one list of ids, or a list of either, as a list of prompts; tensors and arrays of ids count as lists.

    Raises:
        InputError: anything else.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise InputError("prompts", prompts, "give a text, a list of token ids, or a list of those")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return [as_prompt(prompt) for prompt in prompts]


def as_prompt(prompt: object) -> Prompt:
    """One text, or one list of ids; a tensor or array of ids counts as a list.

    Raises:
        InputError: anything else.
    """
    plain = _plain(prompt)
    if not isinstance(plain, str | list):
        raise InputError("prompt", prompt, "give a text or a list of token ids")
    return plain


def as_conversations(messages: object) -> list[Conversation]:
    """One conversation, or a list of them, as a list.

    Raises:
        InputError: anything else.
    """
    if isinstance(messages, list | tuple) and messages and all(isinstance(one, list | tuple) for one in messages):
        return [as_conversation(one) for one in messages]
    return [as_conversation(messages)]


def as_conversation(messages: object) -> Conversation:
    """A list of at least one message, each a mapping whose `role` is a text.

    Raises:
        InputError: anything else; names the message.
    """
    example = '{"role": "user", "content": "Hello"}'
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError("messages", messages, f"give a list of messages, such as [{example}]")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError("messages", message, f"each must be a mapping such as {example}")
    return list(messages)


def prompt_content(where: str, item: Mapping[str, Any]) -> str | tuple[Message, ...] | tuple[int, ...]:
    """What one object of a file of prompts asks: its `messages` (a conversation, up to its last answer), `prompt_ids`
    or `prompt` (a text).

    Raises:
        InputError: none of these, messages that are no conversation or an answer alone, or tools; names the place
            `where`.
    """
    check_no_tools(where, item)
    if "messages" in item:
        try:
            conversation = as_conversation(item["messages"])
        except InputError as error:
            raise InputError("prompts", where, f'"messages": {error.remedy}') from error
        return asked_messages(where, conversation)
    ids, text = item.get("prompt_ids"), item.get("prompt")
    if isinstance(ids, list) and ids and all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        return tuple(ids)
    if isinstance(text, str) and text:
        return text
    raise InputError("prompts", where, "must hold messages (a list), prompt_ids (whole numbers) or prompt (a text)")


def asked_messages(where: str, messages: Conversation) -> tuple[Message, ...]:
    """A conversation up to its last answer, which is not sent; contents in parts are joined where all are texts.

    Raises:
        InputError: an answer alone; names the place `where`.
    """
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not asked:
        raise InputError("prompts", where, '"messages" holds an answer alone; give the messages that it answers, too')
    joined = [(one, message_text(one)) for one in asked]
    return tuple(one if text is None else {**one, "content": text} for one, text in joined)


def message_text(message: Message) -> str | None:
    """The text of a message, whole or in OpenAI's parts; None where it holds something else."""
    content = message.get("content")
    parts = _text_parts(content)
    return content if isinstance(content, str) else None if parts is None else "".join(parts)


def _text_parts(content: object) -> list[str] | None:
    """The texts of a content in parts; None where it is in none, or some part is no text."""
    if not isinstance(content, list | tuple) or not content:
        return None
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return found if len(found) == len(texts) else None


def check_no_tools(where: str, request: Mapping[str, Any]) -> None:
    """Refuse a request with tools, which a conversation's messages do not hold.

    Raises:
        InputError: it has some; names the place `where`.
    """
    for key in ("tools", "functions"):
        if request.get(key):
            raise InputError("prompts", where, f'has "{key}": {TOOLS_REMEDY}')


def check_no_tool_calls(where: str, messages: object) -> None:
    """Refuse messages that call tools or are their results, for readers that keep only `role` and `content`.

    Raises:
        InputError: there is one; names the place `where`.
    """
    for message in messages if isinstance(messages, list | tuple) else ():
        if not isinstance(message, Mapping):
            continue
        key = next((key for key in _TOOL_KEYS if message.get(key)), None)
        if key is None and message.get("role") in _TOOL_ROLES:
            key = "role"
        if key is not None:
            said = f'the role "{message["role"]}"' if key == "role" else f'"{key}"'
            raise InputError("prompts", where, f"a message has {said}: {TOOLS_REMEDY}")


def per_prompt(name: str, value: object, count: int) -> list:  # type: ignore[type-arg]
    """One value for all of `count` prompts, or a list with one for each, as a list.

    Raises:
        InputError: a list of another length.
    """
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise InputError(name, f"{len(value)} values", f"give one value, or one for each of the {count} prompts")
    return list(value)


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple | range) else value


def check_template_values(tools: object, options: object) -> None:
    """What a chat template gets beside the messages.

    Raises:
        InputError: tools that are no list of mappings, options that are no mapping.
    """
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        example = '{"type": "function", "function": {"name": "now"}}'
        raise InputError("tools", tools, f"give a list of mappings, such as [{example}], or leave them out")
    if options is not None and not isinstance(options, Mapping):
        raise InputError("options", options, 'give a mapping, such as {"enable_thinking": False}, or leave them out')


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
            check_template_values(tools, options)
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


def _check_text(field: str, text: object) -> str:
    """`text`, which is one, and can be encoded in UTF-8."""
    if not isinstance(text, str):
        raise InputError(field, text, "must be a text")
    check_text(field, text)
    return text


def _check_media(messages: Conversation) -> None:
    """Refuse what is no text: templates of models that see write a token for it, and there would be nothing behind it.

    Raises:
        InputError: names the message.
    """
    for place, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and _MEDIA.search(kind):
                remedy = "is not taken: models read text only here; leave it out"
                raise InputError(f"messages.{place}.content", f"a part of type {kind}", remedy)


def _joined(message: Message) -> Message:
    """A message whose content in parts is one text, where all parts are texts."""
    texts = _text_parts(message.get("content"))
    return message if texts is None else {**message, "content": "\n".join(texts)}


@contextmanager
def _shallow() -> Iterator[None]:
    """Refuse what is nested so deeply that it cannot be walked through."""
    try:
        yield
    except RecursionError:
        remedy = "they, or the tools beside them, are nested too deeply; flatten them"
        raise InputError("messages", "objects inside of objects", remedy) from None


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
