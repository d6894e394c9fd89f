"""Chat templates: Jinja from a model folder, rendered by a process bounded in time and memory, without files."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from foretoken.errors import CheckpointError, InputError

# A template of a known model renders a chat of a million tokens in a second and 100 MB.
CPU_S = 3.0
MEMORY_BYTES = 256 << 20
_WAIT_S = 20.0  # of the parent, where the processor time of a child cannot be bounded or the machine is busy
_MAX_SOURCE = 1 << 20
_MARK = "\uffff "  # no character, so no text has it; the space shows whether a template removes spaces at the end
_MAX_CHARS = 4_000_000  # and twice what the messages have
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TAKES_TOOLS = re.compile(r"\btools\b")
_TAKES_PARTS = re.compile(r"""['"]text['"]|\.text\b""")

_Json: TypeAlias = Any  # what a message may hold


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
    where: str,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text that `source` makes of a chat, as transformers would; `where` names the folder in errors.
    `options` are further variables; of those that are set here they replace `add_generation_prompt` alone.

    Raises:
        InputError: the template refuses the messages, or fails where the content of one is no text.
        CheckpointError: the template is broken, or asks for too much time or memory.
    """
    if len(source) > _MAX_SOURCE:
        raise CheckpointError(
            f"the chat template in {where} is longer than {_MAX_SOURCE:,} characters; this is no template "
            "of a language model"
        )
    values = {
        "add_generation_prompt": add_generation_prompt,
        **_plain(options or {}),
        "messages": [_with_reasoning(message) for message in _plain(messages)],
        "tools": _plain(tools),
        "documents": None,
        **special_tokens,
    }
    given = json.dumps(values)
    reply = _worker.ask(
        f'{{"source": {json.dumps(source)}, "values": {given}, "max_chars": {_MAX_CHARS + 2 * len(given)}}}'
    )
    if "text" in reply:
        return reply["text"]
    _fail(reply, messages, where)


def marked_last(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark behind the text of the last one, for `cut_at_mark`.

    Raises:
        InputError: the last message has no text, or calls tools behind it.
    """
    last = dict(messages[-1]) if messages else {}
    content = None if last.get("tool_calls") else last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK
    else:
        parts = [dict(part) for part in content] if isinstance(content, list) else []
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        if not texts:
            raise InputError("continue_final_message", True, "needs a last message that is a text and calls no tool")
        texts[-1]["text"] += _MARK
        last["content"] = parts
    return [*messages[:-1], last]


def cut_at_mark(text: str) -> str:
    """What a template made of `marked_last`, up to the end of the last message's text: without spaces behind it where
    the template removes them.

    Raises:
        InputError: the template does not write the last message as it is.
    """
    place = text.rfind(_MARK.strip())
    if place < 0:
        remedy = "the chat template does not write the text of the last message; leave it out"
        raise InputError("continue_final_message", True, remedy)
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def takes_tools(source: str) -> bool:
    """Whether a template writes the tools that a chat comes with; another one would leave them out."""
    return _TAKES_TOOLS.search(source) is not None


def takes_parts(source: str) -> bool:
    """Whether a template reads contents in parts; others write such a list as Python shows it, or fail."""
    return _TAKES_PARTS.search(source) is not None


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The Jinja sources of a checkpoint by name: `default`, and `tool_use` where chats with tools have their own.

    Files of the folder replace what the settings of its tokenizer hold, as in transformers.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    files = {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _source(file) for name, file in files.items()}
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
    else:
        named = {"default": found}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _source(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as UTF-8 text ({error}); download it again") from error


def _fail(reply: Mapping[str, str], messages: Sequence[Mapping[str, Any]], where: str) -> NoReturn:
    """Raise what a reply without a text stands for."""
    if "refused" in reply:
        raise InputError("messages", list(messages), f"the chat template refuses them: {reply['refused']}")
    if "broken" in reply:
        raise CheckpointError(f"the chat template in {where} is broken: {reply['broken']}")
    if "failed" in reply:
        for place, message in enumerate(messages):  # most templates add texts up, whatever a message holds
            if not isinstance(message.get("content"), str):
                remedy = f"must be a text for this chat template, which failed: {reply['failed']}"
                raise InputError(f"messages.{place}.content", message.get("content"), remedy)
        raise CheckpointError(f"the chat template in {where} failed: {reply['failed']}")
    remedy = "shorten the messages, or replace the template if its source is unknown"
    if "too_large" in reply:
        raise CheckpointError(
            f"the chat template in {where} takes more than {MEMORY_BYTES >> 20} MB or writes too long a text; {remedy}"
        )
    raise CheckpointError(
        f"the chat template in {where} takes longer than {CPU_S:g} s or breaks its process ({reply['ended']}); {remedy}"
    )


def _plain(value: _Json) -> _Json:
    """The same in JSON's types: templates get no object with methods of its own."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _plain(value.item())  # a number of numpy or torch
    return f"<{type(value).__name__}>"


def _with_reasoning(message: _Json) -> _Json:
    """A message whose reasoning stands under every name that templates read."""
    if not isinstance(message, dict):
        return message
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


class _Worker:
    """The process that renders, started on first use and after a template has ended it. Serves one caller at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, job: str) -> dict[str, str]:
        """The reply to a job; `ended` says why there is none."""
        with self._lock:
            process = self._process if self._process is not None and self._process.poll() is None else self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            watchdog = threading.Timer(_WAIT_S, process.kill)
            watchdog.start()
            try:
                with suppress(BrokenPipeError):  # then there is no reply either
                    process.stdin.write(job + "\n")
                    process.stdin.flush()
                line = process.stdout.readline()
            except BaseException:  # an interrupt leaves a reply behind that is nobody's
                self.close()
                raise
            finally:
                watchdog.cancel()
            reply: dict[str, str] = json.loads(line) if line.endswith("\n") else {"ended": f"status {process.wait()}"}
            if "ended" in reply or "too_large" in reply:
                self.close()
            return reply

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):  # what was not written yet
                    stream.close()
            process.wait()

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        self.__init__()  # type: ignore[misc]

    def _start(self) -> subprocess.Popen[str]:
        self.close()
        folders = {
            str(Path(str(spec.origin)).parents[1])
            for name in ("jinja2", "markupsafe")
            if (spec := find_spec(name)) is not None
        }
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py")), *sorted(folders)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, encoding="ascii"
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"memory_bytes": MEMORY_BYTES, "cpu_s": CPU_S}) + "\n")
        return self._process


_worker = _Worker()
atexit.register(_worker.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_worker.forget)
