"""`foretoken chat`: a conversation with a model, on a terminal or through pipes."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from foretoken.cli.answer import as_json_object
from foretoken.cli.common import (
    CacheOption,
    CostProfileOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    NumericsOption,
    TargetOption,
    announcer,
    engine_config,
    print_json,
    progress,
)
from foretoken.cli.spec_options import answering_spec, check_sources, with_spec_flags
from foretoken.config import SamplingParams
from foretoken.core import StepOutput
from foretoken.engine.llm import LLM
from foretoken.engine.output import GenerateOutput
from foretoken.engine.prompts import Message
from foretoken.errors import ForetokenError, StorageError
from foretoken.printing.console import Console

_HELP = "/clear begins a new conversation, /exit ends; Ctrl-C stops an answer."


@with_spec_flags
def chat(
    context: typer.Context,
    target: TargetOption = "reference:target",
    system: Annotated[str | None, typer.Option(help="The system message, before the conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token; 1 samples the model's own distribution.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the smallest set of tokens that holds this probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 = all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens in the conversation and answer; 1 = off.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Repeat the same random choices.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cache_tokens: CacheOption = None,
    numerics: NumericsOption = "default",
    cost_profile: CostProfileOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Talk to a model: each line is a message, and the conversation is kept.

    On a terminal answers are streamed; /clear begins a new conversation, /exit or the end of input ends, Ctrl-C stops
    an answer. In a pipe each line of standard input gets one answer, with --json one JSON object on a line.
    """
    spec = answering_spec(context.params)
    if spec is not None:
        spec.for_request(None)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    config = engine_config(target, spec, context.params)
    check_sources(spec)
    with progress(f"loading {target}") as status:
        llm = LLM(config, on_profile=announcer(status))
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    with llm:
        llm.render_chat([*opening, {"role": "user", "content": "Hello"}])  # without a template, refuse before reading
        is_interactive = sys.stdin is not None and sys.stdin.isatty() and not as_json
        if is_interactive:
            Console(stderr=True).line(_HELP, style="dim")
        _Chat(llm, params, opening, is_interactive, as_json).run()


class _Chat:
    """A conversation that goes on until the input ends."""

    def __init__(
        self, llm: LLM, params: SamplingParams, opening: list[Message], is_interactive: bool, as_json: bool
    ) -> None:
        self._llm, self._params, self._opening = llm, params, opening
        self._is_interactive, self._as_json = is_interactive, as_json
        self._messages = list(opening)

    def run(self) -> None:
        """Answer each line.

        Raises:
            ForetokenError: an answer failed; on a terminal that is printed, and the conversation goes on without it.
        """
        for line in _typed_lines() if self._is_interactive else _piped_lines():
            if self._is_interactive and not line.strip():
                continue
            if line.strip() == "/exit":
                return
            if line.strip() == "/clear":
                self._messages = list(self._opening)
                continue
            try:
                self._answer(line)
            except ForetokenError as error:
                if not self._is_interactive:
                    raise
                Console(stderr=True).message(f"error: {error}", style="red")

    def _answer(self, line: str) -> None:
        """Answer one message; both are kept, also when the answer is stopped half-way."""
        asked, said = [*self._messages, {"role": "user", "content": line}], list[str]()
        console = Console()

        def on_step(outputs: list[StepOutput]) -> None:
            for output in outputs:
                said.append(output.text)
                if not self._as_json:
                    console.answer(output.text)

        try:
            output = self._llm.chat(asked, self._params, on_step=on_step)[0]
            if output.error is not None:
                raise output.error
            self._print_end(output)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            console.line()
        self._messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _print_end(self, output: GenerateOutput) -> None:
        if self._as_json:
            print_json(as_json_object(output))
        else:
            Console().line()


def _typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, until the end of input."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            Console().line()
            return


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
