"""What a caller may ask with: texts, token ids, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.errors import ContextLengthError, InputError

TOOLS_REMEDY = "tools and tool calls are not replayed; leave these requests out"
_TOOL_ROLES = ("tool", "function")
_TOOL_KEYS = ("tool_calls", "tool_call_id", "function_call")  # of a message


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
    """At least one message, each a mapping whose `role` is a text.

    Raises:
        InputError: names the message.
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
    parts = text_parts(content)
    return content if isinstance(content, str) else None if parts is None else "".join(parts)


def text_parts(content: object) -> list[str] | None:
    """The texts of a content in parts; None where it is in none, or some part is no text."""
    if not isinstance(content, list | tuple) or not content:
        return None
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return found if len(found) == len(texts) else None


def check_no_tools(where: str, request: Mapping[str, Any]) -> None:
    """Refuse (`InputError`) a request with tools, which messages do not hold; `where` names its place."""
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
    """One value for all of `count` prompts, or one for each, as a list.

    Raises:
        InputError: another number.
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


def check_length(num_tokens: int, context: int, is_minimum: bool = False) -> None:
    """Whether a prompt of `num_tokens` leaves room for a token of the answer; `is_minimum`: it may have more of them.

    Raises:
        ContextLengthError: it does not.
    """
    if num_tokens >= context:
        remedy = f"the context holds {context} tokens; shorten the prompt to at most {context - 1}"
        raise ContextLengthError("prompt", f"{num_tokens} tokens{' or more' if is_minimum else ''}", remedy)
