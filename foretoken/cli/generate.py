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
    AdaptOption,
    CacheOption,
    CacheReserveOption,
    CostProfileOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MaxBatchSizeOption,
    MaxPromptTokensOption,
    MaxSpeculatingOption,
    MaxStepTokensOption,
    MinTokensForDraftModelOption,
    MinTokensToSpeculateOption,
    NumericsOption,
    TargetOption,
    WeightsOption,
    announcer,
    engine_config,
    fetch_models,
    progress,
    texts_of,
    was_given,
)
from foretoken.cli.sampling_options import sampling_params, with_sampling_flags
from foretoken.cli.spec_options import answering_spec, check_sources, with_spec_flags
from foretoken.config import SamplingParams, SpecConfig
from foretoken.control.queue import SchedulerConfig
from foretoken.control.routing import RoutingRules
from foretoken.engine.prompts import Conversation, as_conversation
from foretoken.engine_config import EngineConfig
from foretoken.errors import ConfigError, InputError
from foretoken.files import check_file, parse_json
from foretoken.printing.console import Console

if TYPE_CHECKING:
    from foretoken.core import StepOutput
    from foretoken.engine.llm import LLM

# Options whose text may stand in a file or on standard input.
_TEXTS = ("prompt", "prompt_ids", "messages", "prediction", "json_schema", "grammar")
_ROUTING = ("min_tokens_to_speculate", "min_tokens_for_draft_model", "max_speculating_requests")

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
_PredictionOption = Annotated[
    str | None, typer.Option(help="The answer you expect, for --drafter predicted: the text, @FILE, or -.")
]
_LogprobsOption = Annotated[
    int | None, typer.Option(help="Report log-probabilities: of each token and of this many likeliest.")
]
_PromptLogprobsOption = Annotated[
    int | None, typer.Option(help="The same for the prompt's tokens, under the model's own distribution.")
]
_JsonSchemaOption = Annotated[
    str | None, typer.Option(help="Hold the answer to this JSON schema: the text, @FILE, or -.")
]
_GrammarOption = Annotated[
    str | None, typer.Option(help="Hold the answer to this Lark grammar: the text, @FILE, or -.")
]
_DeadlineOption = Annotated[
    float | None, typer.Option("--deadline", help="Seconds after which the answer is wanted: orders service.")
]


@with_spec_flags
@with_sampling_flags
def generate(
    context: typer.Context,
    target: TargetOption = DEFAULT_MODEL,
    prompt: _PromptOption = None,
    prompt_ids: _PromptIdsOption = None,
    chat: _ChatOption = False,
    messages: _MessagesOption = None,
    prediction: _PredictionOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    n: Annotated[int, typer.Option(help="Answers to draw.")] = 1,
    logprobs: _LogprobsOption = None,
    prompt_logprobs: _PromptLogprobsOption = None,
    json_schema: _JsonSchemaOption = None,
    regex: Annotated[str | None, typer.Option(help="Hold the answer to this regular expression.")] = None,
    grammar: _GrammarOption = None,
    priority: Annotated[int, typer.Option(help="Smaller is served earlier.")] = 0,
    deadline_s: _DeadlineOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cache_tokens: CacheOption = None,
    cache_reserve: CacheReserveOption = EngineConfig.cache_reserve,
    max_batch_size: MaxBatchSizeOption = SchedulerConfig.max_batch_size,
    max_prompt_tokens: MaxPromptTokensOption = SchedulerConfig.max_prompt_tokens,
    max_step_tokens: MaxStepTokensOption = None,
    min_tokens_to_speculate: MinTokensToSpeculateOption = RoutingRules.min_tokens_to_speculate,
    min_tokens_for_draft_model: MinTokensForDraftModelOption = RoutingRules.min_tokens_for_draft_model,
    max_speculating_requests: MaxSpeculatingOption = None,
    numerics: NumericsOption = "default",
    weights: WeightsOption = "auto",
    cost_profile: CostProfileOption = "auto",
    adapt: AdaptOption = False,
    trace: Annotated[Path | None, typer.Option(help="Append one line per event to this .jsonl file.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Mark each token by where it came from, with a legend.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, with guesses unless --drafter none is given, and say what it cost."""
    from foretoken.engine.llm import LLM

    texts = texts_of(context.params, _TEXTS)
    given = context.params | texts
    asked, params, spec = _asked(texts, chat), sampling_params(given), answering_spec(given)
    if spec is not None:
        spec.for_request(params.prediction)  # what cannot go together is refused before anything is loaded
    config = engine_config(target, spec, given, routing=_rules(context, spec))
    fetch_models(target)
    check_sources(spec)
    if trace is not None:
        check_file("trace", trace)
    with progress(f"loading {target}") as status:
        llm = LLM(config, on_profile=announcer(status))
    with llm:
        _answer(llm, asked, params, show, as_json)
    if llm.trace_error is not None:
        raise llm.trace_error


def _answer(llm: LLM, asked: _Asked, params: SamplingParams, show: bool, as_json: bool) -> None:
    """Answer, and print the answer in the form that was asked for.

    Raises:
        ForetokenError: the answer failed.
        KeyboardInterrupt: it was stopped; what had come is shown and counted.
    """
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


def _rules(context: typer.Context, spec: SpecConfig | None) -> RoutingRules:
    """When not to guess; only an open number of guesses is open to rules.

    Raises:
        InputError: a rule that makes no sense, or that nothing here would ask.
    """
    given = {name: context.params[name] for name in _ROUTING}
    for name in _ROUTING:
        if spec is not None and was_given(context, name) and (spec.drafter is None or spec.num_draft != "auto"):
            remedy = (
                "nobody guesses: name a --drafter other than none"
                if spec.drafter is None
                else f"num_draft={spec.num_draft} is set: leave that to auto"
            )
            raise ConfigError(
                name, given[name], f"rules hold where the number of guesses is open, and {remedy}, or leave this out"
            )
    return RoutingRules(**given)


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
        InputError: none or several, or one that cannot be meant.
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
