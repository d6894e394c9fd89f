"""Prompts of an evaluation: texts, conversations, or token ids, each with a slice and a hash of its content.

The hash identifies a prompt in two results, whatever the tokenizer and the chat template make of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.engine.llm import LLM
from foretoken.engine.prompts import prompt_content
from foretoken.errors import InputError
from foretoken.files import parse_json, read_text, to_json
from foretoken.measure import workload
from foretoken.measure.options import ALL
from foretoken.measure.prompts import asked_of, check_room, messages_of, prompt_files, prompts_or_library, read_prompts

_OWN_KEYS = ("messages", "prompt_ids")


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt: a text, the messages of a conversation, or token ids; `max_tokens` and `temperature` are those of a
    recorded request, None where the file says nothing. They are no part of what is compared (`key`).
    """

    name: str
    slice: str
    content: str | tuple[Mapping[str, Any], ...] | tuple[int, ...]
    prediction: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None

    @property
    def key(self) -> str:
        """A hash of slice, content and prediction."""
        text = to_json([self.slice, self.content, self.prediction])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def own_prompts(slices: Sequence[str], per_slice: int) -> list[EvalPrompt]:
    """Prompts of the library: `per_slice` of each slice.

    Raises:
        InputError: an unknown slice.
    """
    chosen, _ = prompts_or_library(None, slices, per_slice)
    return [EvalPrompt(one.name, one.slice, one.text, one.prediction) for one in chosen]


def prompts_of(path: Path | None, slices: Sequence[str], per_slice: int) -> list[EvalPrompt]:
    """At most `per_slice` prompts of each wanted slice of a file, or of all .json and .jsonl files below a folder; of
    the library where `path` is None.

    A file of JSON lines with `messages` or `prompt_ids`, and optional `slice` and `name`, or in a format of
    `measure.prompts`.

    Raises:
        StorageError: a file cannot be read, or the folder holds none.
        InputError: an object in none of the formats, no prompt, or a slice without a prompt.
    """
    if path is None:
        return own_prompts(slices, per_slice)
    found = [prompt for file in prompt_files(path) for prompt in _read(file)]
    known = dict.fromkeys(prompt.slice for prompt in found)
    for name in slices:
        if name not in known and name != ALL:
            raise InputError("slices", name, f"the prompts have {', '.join(known)}; or take {ALL}")
    chosen = []
    for name in known:
        if ALL in slices or name in slices:
            chosen += [one for one in found if one.slice == name][:per_slice]
    return chosen


def encoded(llm: LLM, prompt: EvalPrompt, chat: bool) -> list[int]:
    """Token ids of a prompt: messages through the target's chat template; with `chat` texts too, as a user's message.

    Raises:
        InputError: the target has no tokenizer, or no chat template.
        CheckpointError: the template is broken.
    """
    if isinstance(prompt.content, str):
        if chat:
            return llm.encode_chat([{"role": "user", "content": prompt.content}])
        return llm.encode(prompt.content)
    if isinstance(prompt.content[0], int):
        return [token for token in prompt.content if isinstance(token, int)]
    return llm.encode_chat([message for message in prompt.content if isinstance(message, Mapping)])


def fitting(llm: LLM, prompts: Sequence[EvalPrompt], chat: bool) -> list[list[int]]:
    """The tokens of prompts; raises as `encoded` does, and InputError: one does not fit into the target's context."""
    found = [encoded(llm, prompt, chat) for prompt in prompts]
    for prompt, ids in zip(prompts, found, strict=True):
        check_room("prompts", prompt.name, len(ids), llm.target.max_context_tokens - 1)
    return found


def in_turns(prompts: Sequence[EvalPrompt]) -> list[EvalPrompt]:
    """One prompt of each slice after the other, so that an interrupted run has some of every slice."""
    return workload.in_turns(prompts, lambda prompt: prompt.slice)


def _read(path: Path) -> list[EvalPrompt]:
    text = read_text("prompts", path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines or lines[0][1].lstrip().startswith("["):
        return _of_bench(path)
    items = [(number, parse_json("prompts", f"{path}:{number}", line)) for number, line in lines]
    if not any(isinstance(item, dict) and any(key in item for key in _OWN_KEYS) for _, item in items):
        return _of_bench(path)
    return [_parse(path, number, item) for number, item in items]


def _of_bench(path: Path) -> list[EvalPrompt]:
    found = []
    for one in read_prompts(path):
        content = tuple(messages_of(one)) if one.messages else one.text
        found.append(EvalPrompt(one.name, one.slice, content, one.prediction, one.max_tokens, one.temperature))
    return found


def _parse(path: Path, number: int, item: object) -> EvalPrompt:
    """A line with `messages` or `prompt_ids`; in a file that has one, lines with `prompt` may stand as well."""
    where = f"{path}:{number}"
    if not isinstance(item, dict):
        raise InputError("prompts", where, "every line must be an object with messages, prompt_ids or prompt")
    texts = {key: item.get(key, usual) for key, usual in (("name", f"{path.stem}:{number}"), ("slice", path.stem))}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise InputError("prompts", where, f'"{key}" must be a text')
    prediction = item.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise InputError("prompts", where, '"prediction" must be a text')
    content = prompt_content(where, item)
    return EvalPrompt(texts["name"], texts["slice"], content, prediction or None, **asked_of(where, item))
