"""`foretoken generate`: one answer, streamed, or several."""

# ruff: noqa: ARG001 - most options are read from the context

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.common import (
    DEFAULT_MODEL,
    JsonOption,
    engine_config,
    fetch_models,
    progress,
    routing_rules,
    texts_of,
)
from foretoken.cli.flags import answering_spec, check_sources, config_from, takes
from foretoken.config import DRAFTING, SamplingParams, SpecConfig
from foretoken.control.queue import BATCHES
from foretoken.control.routing import RoutingRules
from foretoken.engine.prompts import Conversation, as_conversation
from foretoken.engine_config import MODEL, EngineConfig
from foretoken.errors import InputError
from foretoken.files import check_file, parse_json
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.core import StepOutput
    from foretoken.engine.llm import LLM

# Options whose text may stand in a file or on standard input.
_TEXTS = ("prompt", "prompt_ids", "messages", "prediction", "json_schema", "grammar")

_PromptOption = Annotated[
    str | None, typer.Option("--prompt", "-p", help="The text to continue; @FILE, - (standard input), @@ for an @.")
]
_PromptIdsOption = Annotated[
    str | None, typer.Option(help="Token ids to continue (for a folder without a tokenizer): 1,2,3, @FILE, or -.")
]
_ChatOption = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message, for the model's chat template.")
]
_MessagesOption = Annotated[
    str | None, typer.Option(help="A conversation to continue, a JSON list of messages: the text, @FILE, or -.")
]


@takes(SpecConfig)
@takes(RoutingRules)
@takes(SamplingParams)
@takes(EngineConfig, MODEL, BATCHES, DRAFTING, fields=("trace",))
def generate(
    context: typer.Context,
    target: str = DEFAULT_MODEL,
    prompt: _PromptOption = None,
    prompt_ids: _PromptIdsOption = None,
    chat: _ChatOption = False,
    messages: _MessagesOption = None,
    max_tokens: int = 128,
    trace: Path | None = None,
    show: Annotated[bool, typer.Option("--show", help="Mark each token by where it came from, with a legend.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with drafts unless --drafter none is given, and say what it cost."""
    from foretoken.engine.llm import LLM

    texts = texts_of(context.params, _TEXTS)
    given = context.params | texts
    asked, params, spec = _asked(texts, chat), config_from(SamplingParams, given), answering_spec(given)
    if spec is not None:
        spec.for_request(params.prediction)  # what cannot go together is refused before anything is loaded
    config = engine_config(spec, given, routing_rules(given, spec))
    fetch_models(target)
    check_sources(spec)
    if trace is not None:
        check_file("trace", trace)
    with progress(f"loading {target}") as status:
        llm = LLM(config, on_profile=status.say)
    with llm:
        _answer(llm, asked, params, show, as_json)
    if llm.trace_error is not None:
        raise llm.trace_error


def _answer(llm: LLM, asked: _Asked, params: SamplingParams, show: bool, as_json: bool) -> None:
    """Answer, and print the answer in the form that was asked for."""
    from foretoken.cli.answer import print_cost_profile, report

    prompt = asked.prompt if asked.messages is None else llm.encode_chat(asked.messages)
    stream_out = not show and not as_json and llm.tokenizer is not None and params.n == 1 and params.logprobs is None
    shown = _Streamed()
    try:
        output = llm.generate([prompt], params, on_step=shown if stream_out else None)[0]
    except KeyboardInterrupt:
        if stream_out:
            console = Console(stderr=True)
            if console.is_terminal:
                console.line()  # behind the text and the terminal's own ^C
            console.line(f"stopped after {shown.num_tokens} tokens", style="dim")
        raise
    if output.error is not None:
        raise output.error
    report(llm, output, show, as_json, stream_out)
    if show and llm.stats.profile_s:
        print_cost_profile(llm)


class _Streamed:
    """Prints an answer as it comes, and counts its tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def __call__(self, outputs: list[StepOutput]) -> None:
        from foretoken.cli.answer import print_pieces

        self.num_tokens += sum(len(output.token_ids) for output in outputs)
        print_pieces(outputs)


@dataclass(frozen=True)
class _Asked:
    """What to continue: a text or token ids, or a conversation."""

    prompt: str | list[int]
    messages: Conversation | None = None


def _asked(texts: Mapping[str, str | None], chat: bool) -> _Asked:
    """What the options ask for, of which exactly one is given.

    Raises:
        InputError: none, several, or a wrong one.
    """
    text, ids, messages = texts["prompt"], texts["prompt_ids"], texts["messages"]
    if sum(value is not None for value in (text, ids, messages)) != 1:
        raise InputError("prompt", text, "give one of --prompt TEXT, --prompt-ids 1,2,3 and --messages JSON")
    if messages is not None:
        return _Asked([], as_conversation(parse_json("messages", "messages", messages)))
    if text is not None:
        if not text:
            raise InputError("prompt", text, "is empty; give at least one character")
        return _Asked(text, [{"role": "user", "content": text}] if chat else None)
    assert ids is not None
    if chat:
        raise InputError("prompt_ids", ids, "a chat template lays out text: give --prompt or --messages with --chat")
    try:
        return _Asked([int(part) for part in ids.split(",")])
    except ValueError:
        raise InputError("prompt_ids", ids, "must be whole numbers separated by commas") from None
