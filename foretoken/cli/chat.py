"""`foretoken chat`: a conversation with a model, on a terminal or through pipes."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.common import DEFAULT_MODEL, JsonOption, engine_config, fetch_models, is_set, print_json, progress
from foretoken.cli.exits import Terminated
from foretoken.cli.flags import answering_spec, check_sources, config_from, takes
from foretoken.config import DRAFTING, SamplingParams, SpecConfig
from foretoken.engine.prompts import Message
from foretoken.engine_config import MODEL, EngineConfig
from foretoken.errors import ContextLengthError, ForetokenError, InputError, StorageError
from foretoken.params import ADVISED_FIELDS, SAMPLING
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.cli.conversation import Talk
    from foretoken.engine.llm import LLM

_HELP = "/help lists the commands, /exit ends; Ctrl-C stops an answer."
_AGAIN = "Ctrl-C again ends, /exit does so too."
_NO_TEXT = "error: what was typed is not UTF-8 text: type it again"
_PROMPT = "> "
_FULL = "/reset begins a new conversation."
_NO_TEMPLATE = "{} has no chat template: it continues your text, line by line."


@takes(SpecConfig)
@takes(SamplingParams, SAMPLING)
@takes(EngineConfig, MODEL, DRAFTING)
def chat(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message, before the conversation.")] = None,
    max_tokens: int = 512,
    colour: Annotated[bool, typer.Option("--colour", help="Show by colour where each token came from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Talk to a model: each line is a message, and the conversation is kept.

    On a terminal answers are streamed; /help lists the commands, /exit or the end of input ends, Ctrl-C stops an
    answer. In a pipe each line of standard input gets one answer, with --json one JSON object on a line. A model
    without a chat template continues the text of all lines so far. Where no sampling is given it is the one that the
    model's makers advise (generation_config.json; smollm2: temperature 0.2, top_p 0.9), else greedy.
    """
    from foretoken.cli.conversation import Talk
    from foretoken.engine.llm import LLM
    from foretoken.model.advised import advised_sampling

    params, spec = config_from(SamplingParams, context.params), answering_spec(context.params)
    if spec is not None:
        spec.for_request(None)
    config = engine_config(spec, context.params)
    fetch_models(target)
    if not any(is_set(context, name) for name in ADVISED_FIELDS):
        params = replace(params, **advised_sampling(target))
    check_sources(spec)
    with progress(f"loading {target}") as status:
        llm = LLM(config, on_profile=status.say)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with llm:
        _check_template(llm, target, opening)
        is_interactive = sys.stdin is not None and sys.stdin.isatty() and not as_json
        if is_interactive:
            Console(stderr=True).line(_HELP, style="dim")
        _Lines(Talk(llm, params, opening, colour), is_interactive, as_json).run()


def _check_template(llm: LLM, target: str, opening: list[Message]) -> None:
    """Refuse what cannot chat before a line is read, and say how a model without a template answers."""
    if llm.tokenizer is None:
        raise InputError("target", target, "has no tokenizer; use `foretoken generate --prompt-ids 1,2,3`")
    if llm.tokenizer.chat_template is None:
        Console(stderr=True).line(_NO_TEMPLATE.format(target), style="dim")
        return
    llm.render_chat([*opening, {"role": "user", "content": "Hello"}])


class _Lines:
    """Goes through the lines of standard input until they end."""

    def __init__(self, talk: Talk, is_interactive: bool, as_json: bool) -> None:
        self._talk, self._is_interactive, self._as_json = talk, is_interactive, as_json

    def run(self) -> None:
        """Answer each line.

        Raises:
            ForetokenError: an answer or a command failed; on a terminal that is printed, and the conversation goes on
                without it.
        """
        for line in _typed_lines() if self._is_interactive else _piped_lines():
            if self._is_interactive and not line.strip():
                continue
            if line.strip() == "/exit":
                return
            try:
                if not self._talk.command(line, Console(stderr=True), self._is_interactive):
                    self._answer(line)
            except ForetokenError as error:
                if not self._is_interactive:
                    raise
                Console(stderr=True).message(f"error: {error}", style="red")
                if isinstance(error, ContextLengthError):
                    Console(stderr=True).line(_FULL, style="dim")

    def _answer(self, line: str) -> None:
        from foretoken.cli.answer import as_json_object

        console = Console()
        try:
            output = self._talk.answer(line, (lambda _piece, _style: None) if self._as_json else console.piece)
        except KeyboardInterrupt as stop:
            if not self._is_interactive or isinstance(stop, Terminated):
                raise
            Console().line()  # `console` may still hold the piece that it wrote just then, and would write it again
            return
        if self._as_json:
            print_json(as_json_object(output))
        else:
            console.line()


def _typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, until the end of input; a second Ctrl-C in a row ends the program."""
    with suppress(ImportError):  # Windows has none
        # Without it `input` gets what the terminal keeps of a line: on Linux its first 4095 bytes, on macOS 1024.
        import readline  # noqa: F401
    screen, errors, was_stopped = Console(), Console(stderr=True), False
    if not screen.is_terminal:  # its reader gets the answers alone
        screen = errors
    while True:
        try:
            line = _typed_line(screen)
        except EOFError:
            screen.line()
            return
        except KeyboardInterrupt as stop:
            screen.line()
            if was_stopped or isinstance(stop, Terminated):
                raise
            was_stopped = True
            errors.line(_AGAIN, style="dim")
            continue
        was_stopped = False
        if line is None:
            errors.line(_NO_TEXT, style="red")
        else:
            yield line


def _typed_line(screen: Console) -> str | None:
    """The next line, after a prompt; None if its bytes are not text."""
    try:
        if sys.stdout.isatty():
            line = input(_PROMPT)
        else:  # `input` would write the prompt to standard output
            screen.exact(_PROMPT)
            line = input()
        line.encode()  # some locales let any bytes pass
    except UnicodeError:
        return None
    return line


def _piped_lines() -> Iterator[str]:
    """Lines of standard input.

    Raises:
        StorageError: there is none, or it is not UTF-8.
    """
    if sys.stdin is None:
        raise StorageError("standard input is closed")
    for line in sys.stdin.buffer:
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise StorageError(f"standard input is not UTF-8 text ({error})") from error
