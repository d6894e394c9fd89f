"""Prompts from files: JSON lines of the user, requests recorded for other tools, and public evaluation sets.

    keys of an object                          known from       slice
    prompt [slice, name, prediction]           one's own        `slice`, or the file's name
    messages [slice, name, prediction]         conversations    the same; a last message of the assistant is not sent
    category, turns                            Spec-Bench       chat (MT-Bench's eight), translation, summarisation, qa,
                                                                math, retrieval
    prompt, entry_point, canonical_solution    HumanEval        code
    text, code                                 MBPP             code
    instruction, input, output                 EditEval         edit; the input is the prediction (chat without one)
    question, answers, prompt                  documents + QA   retrieval
    question, answer                           GSM8K            math
    conversations [tools]                      tool calls       json; cut before the first call, without one passed over
    custom_id, body                            OpenAI's batch   `slice`, or the file's name
    session_id, turns                          aiperf           the same; the first turn, behind a system message
    text_input; text                           aiperf           the same

Length and temperature of an answer are read where a request says them (`max_tokens`; guidellm: `output_tokens_count`;
aiperf: `output_length`). A text is continued as it stands, messages go through the target's chat template
(`with_template`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.engine.prompts import asked_messages, check_no_tool_calls, check_no_tools, message_text
from foretoken.errors import InputError, StorageError
from foretoken.files import parse_json, read_text
from foretoken.measure.options import ALL
from foretoken.measure.workload import SLICES, Prompt, in_turns, slices, source_of, without_trailing_space
from foretoken.params import TEMPERATURES, check_number, check_whole

if TYPE_CHECKING:
    from foretoken.engine.llm import LLM

_SUFFIXES = (".json", ".jsonl")
_MAX_CUTS = 50
_HEAD_SHARE = 0.25  # of a cut prompt: its beginning holds the task, its end the question
_SLICE_OF_CATEGORY = {
    **dict.fromkeys(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "chat"),
    "summarization": "summarisation",
    "math_reasoning": "math",
    "rag": "retrieval",
}
_LENGTH_KEYS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "output_length", "output_tokens_count")
_SPEAKERS = {"human": "User", "gpt": "Assistant", "function_call": "Call", "observation": "Result", "system": "System"}


@dataclass(frozen=True)
class _Item:
    """One object of a file, and where it stands."""

    path: Path
    number: int
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.number}"

    def refused(self, remedy: str) -> InputError:
        return InputError("prompts", self.place, remedy)

    def text(self, key: str, may_be_empty: bool = False) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise self.refused(f'"{key}" must be a text' + ("" if may_be_empty else " of at least one character"))
        return value

    def name(self, key: str = "", group: str = "") -> str:
        number = self.values.get(key, self.number) if key else self.number
        return f"{self.path.stem}{group}:{str(number).rsplit('/', 1)[-1]}"

    @property
    def own_name(self) -> str:
        return self.text("name") if "name" in self.values else self.name()

    @property
    def slice(self) -> str:
        return self.text("slice") if "slice" in self.values else self.path.stem

    @property
    def prediction(self) -> str | None:
        return self.text("prediction") if self.values.get("prediction") is not None else None


def prompt_files(path: Path) -> list[Path]:
    """The file, or all .json and .jsonl files below a folder.

    Raises:
        StorageError: the folder holds none.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES) if os.path.isdir(path) else [path]
    if not files:
        raise StorageError(f"no .json or .jsonl file below {path}")
    return files


def read_prompts(path: Path, field: str = "prompts") -> tuple[Prompt, ...]:
    """Every prompt of a file, or of all .json and .jsonl files below a folder; each object tells its format by its
    keys. `field` is the option that names the file.

    Raises:
        StorageError: a file cannot be read, or the folder holds none.
        InputError: an object that is in none of the formats, or no prompt at all.
    """
    items = (item for file in prompt_files(path) for item in _items(file, field))
    try:
        prompts = [prompt for item in items if (prompt := _prompt(item)) is not None]
    except InputError as error:  # found in an item, which knows no option
        raise InputError(field, error.value, error.remedy) from error
    if not prompts:
        raise InputError(field, str(path), 'holds no prompt; write one {"prompt": "..."} a line')
    return tuple(prompts)


def choose(prompts: Sequence[Prompt], names: Sequence[str], per_slice: int) -> tuple[tuple[Prompt, ...], list[str]]:
    """At most `per_slice` prompts of every wanted slice, taken in turn from its files and categories; a note on what
    was left out.

    Raises:
        InputError: a slice that no prompt belongs to.
    """
    found = dict.fromkeys(prompt.slice for prompt in prompts)
    for name in names:
        if name != ALL and name not in found:
            raise InputError("slices", name, f"the prompts have {', '.join(found)}; or take {ALL}")
    wanted = list(found) if ALL in names else list(dict.fromkeys(names))
    chosen: list[Prompt] = []
    counts: list[str] = []
    for name in wanted:
        own = [prompt for prompt in prompts if prompt.slice == name]
        chosen += in_turns(own, source_of)[:per_slice]
        if len(own) > per_slice:
            counts.append(f"{name} {per_slice} of {len(own)}")
    notes = [f"Prompts measured (prompts_per_slice={per_slice}): {', '.join(counts)}."] if counts else []
    return tuple(chosen), notes


def prompts_or_library(path: Path | None, names: Sequence[str], per_slice: int) -> tuple[tuple[Prompt, ...], list[str]]:
    """`choose` from a file or folder of prompts, or from the library where `path` is None."""
    if path is not None:
        return choose(read_prompts(path), names, per_slice)
    return slices(SLICES if ALL in names else names, per_slice), []


def check_room(field: str, name: str, num_tokens: int, most: int) -> None:
    """Refuse a prompt of more than `most` tokens, before work on others.

    Raises:
        InputError: names the prompt.
    """
    if num_tokens > most:
        remedy = f"has {num_tokens} tokens; the context has room for {most}: shorten it, or leave it out"
        raise InputError(field, name, remedy)


def fit(prompts: Sequence[Prompt], count: Callable[[str], int], room: int) -> tuple[tuple[Prompt, ...], list[str]]:
    """Prompts of at most `room` tokens by `count`: what is too long loses its middle, and a note says so.

    Raises:
        InputError: no prompt can be that short.
    """
    if room < 1:
        remedy = "ask for shorter answers than the target's context"
        raise InputError("max_tokens", f"{room} tokens are left for a prompt", remedy)
    fitted = tuple(replace(prompt, text=_cut(prompt.text, count, room)) for prompt in prompts)
    cut = [prompt.name for prompt, short in zip(prompts, fitted, strict=True) if short.text != prompt.text]
    note = f"Cut in the middle to {room} tokens, to fit the target's context with the answer: {', '.join(cut)}."
    return fitted, [note] if cut else []


def _cut(text: str, count: Callable[[str], int], room: int) -> str:
    keep, shorter = len(text), text
    for _ in range(_MAX_CUTS):
        length = count(shorter)
        if length <= room:
            return shorter
        keep = min(keep - 1, int(keep * room / length))
        if keep < 1:
            break
        head = int(keep * _HEAD_SHARE)
        shorter = text[:head] + text[len(text) - (keep - head) :]
    raise InputError("prompts", text, f"cannot be cut to {room} tokens; ask for shorter answers")


def _items(path: Path, field: str) -> Iterator[_Item]:
    """The objects of a file: one a line, or one list of all."""
    content = read_text(field, path)
    if content.lstrip().startswith("["):
        pieces = [(1, content)]
    else:
        pieces = [(number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip()]
    for number, piece in pieces:
        values = parse_json("prompts", f"{path}:{number}", piece)
        listed = list(enumerate(values, start=1)) if isinstance(values, list) else [(number, values)]
        for place, value in listed:
            if not isinstance(value, dict):
                remedy = f"must be an object with the keys of one of these formats: {_known()}"
                raise InputError("prompts", f"{path}:{place}", remedy)
            yield _Item(path, place, value)


def _prompt(item: _Item) -> Prompt | None:
    for keys, make in _FORMATS:
        if all(key in item.values for key in keys):
            return make(item)
    raise item.refused(f"has the keys {', '.join(item.values)}; known formats: {_known()}")


def _known() -> str:
    return "; ".join(" + ".join(keys) for keys, _ in _FORMATS)


def _own(item: _Item) -> Prompt:
    asked = asked_of(item.place, item.values)
    return Prompt(item.own_name, item.slice, item.text("prompt"), prediction=item.prediction, **asked)


def asked_of(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a recorded request says of its answer's length and temperature, by the fields of `Prompt`.

    Raises:
        InputError: a length or temperature that makes no sense; names the `place`.
    """
    length = next((values[key] for key in _LENGTH_KEYS if values.get(key) is not None), None)
    temperature = values.get("temperature")
    try:
        if length is not None:
            check_whole("max_tokens", length, 1, 1 << 20)
        if temperature is not None:
            check_number("temperature", temperature, *TEMPERATURES)
    except InputError as error:
        raise InputError("prompts", place, f"{error.field} there: {error.remedy}") from error
    return {"max_tokens": length, "temperature": temperature}


def _pairs(item: _Item, messages: object) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message; contents in OpenAI's parts are joined where all are texts."""
    check_no_tool_calls(item.place, messages)
    fit = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and message_text(one) is not None for one in messages
    )
    if not fit or not messages:
        raise item.refused('"messages" must be a list of objects with "role" and "content"')
    assert isinstance(messages, list)
    return tuple((one["role"], message_text(one) or "") for one in messages)


def text_pairs(messages: Iterable[object]) -> tuple[tuple[str, str], ...] | None:
    """(role, content) of each message; None where one is no message whose content is a text."""
    pairs = [(one.get("role"), one.get("content")) if isinstance(one, Mapping) else () for one in messages]
    found = tuple((role, text) for role, text in filter(None, pairs) if isinstance(role, str) and isinstance(text, str))
    return found if len(found) == len(pairs) else None


def _conversation(item: _Item) -> Prompt:
    check_no_tools(item.place, item.values)
    pairs = _pairs(item, item.values["messages"])
    asked = pairs[: len(asked_messages(item.place, item.values["messages"]))]
    continuation = pairs[-1][1] if len(asked) < len(pairs) else None
    more = asked_of(item.place, item.values)
    return Prompt(item.own_name, item.slice, "", continuation, item.prediction, asked, **more)


def _batch_request(item: _Item) -> Prompt:
    body, name = item.values["body"], item.text("custom_id")
    if not isinstance(body, dict):
        raise item.refused('"body" must be the object that the request was sent with')
    check_no_tools(item.place, body)
    asked = asked_of(item.place, body)
    text = body.get("prompt", body.get("input"))
    if "messages" in body:
        return Prompt(name, item.slice, "", messages=_pairs(item, body["messages"]), **asked)
    if not isinstance(text, str) or not text:
        raise item.refused('"body" must hold "messages", or a text of at least one character as "prompt" or "input"')
    return Prompt(name, item.slice, text, **asked)


def _trace_text(key: str) -> Callable[[_Item], Prompt]:
    def make(item: _Item) -> Prompt:
        return Prompt(item.name(), item.slice, item.text(key), **asked_of(item.place, item.values))

    return make


def _trace_session(item: _Item) -> Prompt:
    """The first turn of a session: later ones depend on answers that the file does not hold."""
    turns = item.values["turns"]
    texts = [turn.get("text") if isinstance(turn, dict) else None for turn in turns] if isinstance(turns, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise item.refused('"turns" must be a list of objects with a "text"')
    roles = [str(turn.get("role") or "user") for turn in turns]
    count = 2 if roles[0] == "system" and len(turns) > 1 else 1
    pairs = tuple((role, str(text)) for role, text in zip(roles[:count], texts[:count], strict=True))
    return Prompt(item.name("session_id"), item.slice, "", messages=pairs, **asked_of(item.place, turns[count - 1]))


def _lengths_only(item: _Item) -> Prompt:
    raise item.refused(
        "is a trace of lengths without texts, and acceptance depends on texts: give a file with text_input or prompt"
    )


def _spec_bench(item: _Item) -> Prompt:
    category, turns = item.text("category"), item.values["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise item.refused('"turns" must be a list of texts; the first one is the prompt')
    name = item.name("question_id", f"/{category}")
    return Prompt(name, _SLICE_OF_CATEGORY.get(category, category), turns[0].rstrip())


def _human_eval(item: _Item) -> Prompt:
    prompt = Prompt(item.name("task_id"), "code", item.text("prompt"), item.text("canonical_solution"))
    return without_trailing_space(prompt)


def _mbpp(item: _Item) -> Prompt:
    tests = item.values.get("test_list")
    lines = [item.text("text"), *(map(str, tests) if isinstance(tests, list) else ())]
    text, answer = '"""\n' + "\n".join(lines) + '\n"""', "\n" + item.text("code").replace("\r\n", "\n")
    return Prompt(item.name("task_id"), "code", text, answer)


def _edit(item: _Item) -> Prompt:
    before, after = item.text("input", may_be_empty=True), item.text("output")
    if not before.strip():  # nothing to edit: an instruction alone, as in Alpaca's format
        return Prompt(item.name("task_id"), "chat", item.text("instruction").rstrip(), f"\n{after}")
    text = f"# {item.text('instruction').strip()}\n# Before:\n{before}\n# After:"
    return Prompt(item.name("task_id"), "edit", text, f"\n{after}", prediction=f"\n{before}\n")


def _documents(item: _Item) -> Prompt:
    return Prompt(item.name("id"), "retrieval", item.text("prompt").rstrip())


def _gsm8k(item: _Item) -> Prompt:
    return Prompt(item.name(), "math", f"Question: {item.text('question').strip()}\nAnswer:", f" {item.text('answer')}")


def _tool_call(item: _Item) -> Prompt | None:
    turns = item.values["conversations"]
    fit = isinstance(turns, list) and all(isinstance(one, dict) and isinstance(one.get("value"), str) for one in turns)
    if not fit:
        raise item.refused('"conversations" must be a list of objects with "from" and "value"')
    call = next((place for place, turn in enumerate(turns) if turn.get("from") == "function_call"), None)
    if call is None:
        return None
    lines = [f"Functions: {item.values['tools']}"] if item.values.get("tools") else []
    for turn in turns[:call]:
        speaker = str(turn.get("from"))
        lines.append(f"{_SPEAKERS.get(speaker, speaker)}: {turn['value'].strip()}")
    return Prompt(item.name(), "json", "\n".join([*lines, "Call:"]), f" {turns[call]['value']}")


# The first entry whose keys are all there decides, so an entry comes before those that ask for fewer of its keys.
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[_Item], Prompt | None]], ...] = (
    (("messages",), _conversation),
    (("prompt", "entry_point", "canonical_solution"), _human_eval),
    (("question", "answers", "prompt"), _documents),
    (("prompt",), _own),
    (("category", "turns"), _spec_bench),
    (("custom_id", "body"), _batch_request),
    (("session_id", "turns"), _trace_session),
    (("text_input",), _trace_text("text_input")),
    (("instruction", "input", "output"), _edit),
    (("text", "code"), _mbpp),
    (("question", "answer"), _gsm8k),
    (("conversations",), _tool_call),
    (("text",), _trace_text("text")),
    (("input_length", "output_length"), _lengths_only),
)


def with_template(prompts: Sequence[Prompt], llm: LLM, chat: bool = False) -> tuple[Prompt, ...]:
    """Prompts with messages get the text of the chat template; with `chat` all others do, as a user's message.

    Raises:
        InputError: a target without a chat template, messages that it refuses, or a template whose text the tokenizer
            reads otherwise than the template means.
        CheckpointError: the template is broken.
    """
    return tuple(replace(prompt, text=_text(prompt, llm)) if prompt.messages or chat else prompt for prompt in prompts)


def messages_of(prompt: Prompt) -> list[dict[str, str]]:
    """The conversation of a prompt; a text is a user's message."""
    pairs = prompt.messages or (("user", prompt.text),)
    return [{"role": role, "content": content} for role, content in pairs]


def _text(prompt: Prompt, llm: LLM) -> str:
    """The template's text, without a begin-of-text token that the tokenizer adds where the template has written it."""
    messages = messages_of(prompt)
    text, ids = llm.render_chat(messages), llm.encode_chat(messages)
    for cut in (0, *(place + 1 for place, letter in enumerate(text[:64]) if letter in ">]")):  # <s>, <|begin_of_text|>
        if llm.encode(text[cut:]) == ids:
            return text[cut:]
    raise InputError("prompts", prompt.name, "as a text it has other tokens than as messages; give it as a text")
